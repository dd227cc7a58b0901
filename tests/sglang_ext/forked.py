"""What a process of the fork server does in a test. A module of its own, since such a process imports all of it."""

import time


def live() -> None:
    """As SGLang's processes begin."""
    from sglang.srt.utils.common import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    print("alive", flush=True)
    time.sleep(600)
