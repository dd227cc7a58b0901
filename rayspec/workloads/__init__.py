"""What to measure with: conversations, by name or from any JSONL file.

`selection` reads what the config asks for (`name:count:category`, several with commas); `published` knows where named
sets are; `records` turns one line of any of the accepted forms into a Conversation.
"""

from rayspec.workloads.records import Conversation
from rayspec.workloads.selection import load_workload

__all__ = ["Conversation", "load_workload"]
