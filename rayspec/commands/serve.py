"""Serve a champion through SGLang's endpoint: rayspec serve SOURCE [--plan] [-- SGLANG'S OWN FLAGS]

SOURCE is models:/NAME@champion, models:/NAME/VERSION, the id of the run that was promoted, or a folder that was
downloaded from one of them. Its files, its target and the evidence that it is faster are checked first. The server is
SGLang's own, with the settings that were measured; flags behind -- come last and win, but for those that would undo the
checks. Requests must carry the key of $RAYSPEC_API_KEY or of --api-key-file, where there is one; those that change the
server that of $RAYSPEC_ADMIN_KEY, and without it there are none. Exits as the server
does, 2 for what may not be served.
"""

import argparse
import sys

from rayspec.home import prepared_home, tracking_uri
from rayspec.job import problem, set_up
from sglang_ext.adapter.http_app import DEFAULT_MIB, LARGEST


def main(arguments: list[str]) -> int:
    own, more = (arguments, []) if "--" not in arguments else _parted(arguments)
    parser = argparse.ArgumentParser(prog="rayspec serve", description=__doc__.split("\n\n")[0])
    parser.add_argument("source", help="models:/NAME@champion, models:/NAME/VERSION, a run's id, or a folder")
    parser.add_argument("--target", metavar="TARGET", help="where the target lies, if not where the sweep found it")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; other machines reach 0.0.0.0")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--api-key-file", metavar="FILE", help="holds the key that requests must carry")
    parser.add_argument("--force", action="store_true", help="serve one that was not clearly faster")
    parser.add_argument(
        "--no-policy",
        action="store_true",
        help="keep the promoted draft length, whatever the load; without it a policy that was measured is followed",
    )
    parser.add_argument(
        "--max-body-mib",
        metavar="N",
        type=int,
        default=DEFAULT_MIB,
        help="refuse larger requests with status 413; 0: take all",
    )
    parser.add_argument("--plan", action="store_true", help="check it, print the command and stop")
    options = parser.parse_args(own)
    if not 0 <= options.max_body_mib <= LARGEST:
        parser.error(f"--max-body-mib must be in 0..{LARGEST}, got {options.max_body_mib}")
    set_up()

    from rayspec.serving.champion import find_champion  # imports torch and MLflow
    from rayspec.serving.launch import ADMIN_VARIABLE, api_key, described, key_of_environment, serve, server_command
    from rayspec.tracking import connect

    try:
        key = api_key(options.api_key_file)
        key_of_environment(ADMIN_VARIABLE)  # refused now, if at all
        prepared_home()
        client = connect(tracking_uri())
        champion = find_champion(options.source, client, target=options.target, force=options.force)
        command = server_command(champion, options.host, options.port, more, follows_policy=not options.no_policy)
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    print(described(champion, command), flush=True)
    if key is None and options.host not in ("127.0.0.1", "localhost", "::1"):
        print("WARNING: anybody who reaches this address can send requests; set RAYSPEC_API_KEY", file=sys.stderr)
    if options.plan:
        return 0
    return serve(command, num_threads=champion.record.num_threads, key=key, max_body_mib=options.max_body_mib)


def _parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(ours, SGLang's)."""
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]
