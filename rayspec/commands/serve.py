"""Serve a champion through SGLang's endpoint: rayspec serve SOURCE [--plan] [-- SGLANG'S OWN FLAGS]

SOURCE is models:/NAME@champion, models:/NAME/VERSION, the id of the run that was promoted, or a folder that was
downloaded from one of them. Its files, its target and the evidence that it is faster are checked first. The server is
SGLang's own, with the settings that were measured; flags behind -- come last and win, but for those that would undo the
checks. Before it takes traffic a server of its own answers a few prompts (--no-canary leaves that out). --replicas N
(or --min-replicas and --max-replicas) serves through Ray Serve, on the cluster of RAY_ADDRESS or on this machine, and
--follow puts in what the alias of SOURCE points at from then on: it looks every --poll-seconds, and at once when
MLflow's webhook says so (--webhook-port, with the webhook's secret in $RAYSPEC_WEBHOOK_SECRET).

Requests must carry the key of $RAYSPEC_API_KEY or of --api-key-file, where there is one; those that change the server
that of $RAYSPEC_ADMIN_KEY, and without it there are none. --log-format json writes the log as one JSON object a line.
Exits as the server does, 2 for what may not be served.
"""

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayspec.home import prepared_home, tracking_uri
from rayspec.job import INTERRUPTED, problem, set_up
from rayspec.serving.logs import FORMATS, log, set_up_logs, sglang_variables
from sglang_ext.adapter.http_app import DEFAULT_MIB, MAX_MIB

LOOPBACK = ("127.0.0.1", "localhost", "::1")

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from rayspec.serving.access import Access
    from rayspec.serving.champion import Champion
    from rayspec.serving.cluster import Following
    from rayspec.serving.events import Standing
    from rayspec.serving.rollover import RolloverSettings
    from rayspec.serving.scale import Scale
    from rayspec.serving.version import Serving
    from rayspec.serving.webhook import WebhookSettings


def main(arguments: list[str]) -> int:
    own, more = (arguments, []) if "--" not in arguments else _parted(arguments)
    parser = _parser()
    options = parser.parse_args(own)
    if not 0 <= options.max_body_mib <= MAX_MIB:
        parser.error(f"--max-body-mib must be in 0..{MAX_MIB}, got {options.max_body_mib}")
    set_up()
    set_up_logs(options.log_format)
    try:
        asked = _checked(options, more)
        asked.tell()
        if options.plan:
            return 0
        return asked.serve_here() if asked.scale is None else asked.serve_on_ray()
    except (ValueError, OSError) as error:
        log.error("%s", problem(error))
        return 2


def _parser() -> argparse.ArgumentParser:
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
        "--no-canary",
        action="store_true",
        help="take traffic at once; without it a server of its own answers a few prompts first, and what drafts much "
        "worse than its evidence says is not served (versions that --follow puts in are always tried)",
    )
    parser.add_argument(
        "--max-body-mib",
        metavar="N",
        type=int,
        default=DEFAULT_MIB,
        help="refuse larger requests with status 413; 0: take all",
    )
    parser.add_argument("--replicas", type=int, metavar="N", help="serve through Ray Serve, with so many servers")
    parser.add_argument("--min-replicas", type=int, metavar="N", help="with --max-replicas: as many as the load needs")
    parser.add_argument("--max-replicas", type=int, metavar="N")
    parser.add_argument("--requests-each", type=int, metavar="N", help="of a replica, that autoscaling aims at (16)")
    parser.add_argument(
        "--scale-down-seconds", type=float, metavar="S", help="of less load before a replica is ended (600)"
    )
    parser.add_argument("--router", help="balanced (the less busy of two), or prefix: Ray Serve's prefix-aware router")
    parser.add_argument("--drain-seconds", type=float, metavar="S", help="a replica may take to answer what runs (600)")
    parser.add_argument("--follow", action="store_true", help="put in, through Ray Serve, what the alias comes to mean")
    parser.add_argument("--poll-seconds", type=float, metavar="S", help="between two looks at the alias (30)")
    parser.add_argument("--watch-seconds", type=float, metavar="S", help="a new version is watched under traffic (300)")
    parser.add_argument(
        "--canary-mismatches",
        type=int,
        metavar="N",
        help="canary prompts of 16 whose greedy answers may differ from the running version's, as rounding in bf16 has "
        "it (0)",
    )
    parser.add_argument("--webhook-port", type=int, metavar="N", help="take MLflow's notices that the alias has moved")
    parser.add_argument("--webhook-host", metavar="HOST", help="address to take them at (127.0.0.1)")
    parser.add_argument("--log-format", choices=FORMATS, default="text", help="json: each line of the log is an object")
    parser.add_argument("--plan", action="store_true", help="check it, print the command and stop")
    return parser


@dataclass(frozen=True)
class _Asked:
    """A champion that may be served, and how."""

    options: argparse.Namespace
    more: tuple[str, ...]  # SGLang's own flags
    access: "Access"
    client: "MlflowClient | None"  # None for a folder
    source: str  # never an alias
    champion: "Champion"
    command: list[str]
    scale: "Scale | None"
    settings: "RolloverSettings | None"
    webhook: "WebhookSettings | None"
    standing: "Standing | None"

    @property
    def about(self) -> dict[str, Any]:
        return {"version": self.champion.name, "port": self.options.port}

    def tell(self) -> None:
        from rayspec.serving.launch import described
        from rayspec.serving.policy import ONE_LOAD

        log.info("%s", described(self.champion, self.command), extra=self.about)
        if self.champion.policy is None and not self.options.no_policy:
            log.warning("%s: %s", self.champion.name, ONE_LOAD, extra=self.about)
        if self.access.key is None and self.options.host not in LOOPBACK:
            log.warning("anybody who reaches this address can send requests; set RAYSPEC_API_KEY")
        if self.scale is not None:
            log.info("through Ray Serve: %s", self.scale.described)
        if self.webhook is not None:
            log.info("MLflow's webhook tells of a new version at %s", self.webhook.address)

    @property
    def serving(self) -> "Serving":
        from rayspec.serving.scale import Scale
        from rayspec.serving.version import Serving

        return Serving(
            host=self.options.host,
            port=self.options.port,
            access=self.access,
            target=self.options.target,
            force=self.options.force,
            follows_policy=not self.options.no_policy,
            more=self.more,
            scale=self.scale or Scale(),
            tracking_uri=None if self.client is None else self.client.tracking_uri,
            log_format=self.options.log_format,
            tries_first=not self.options.no_canary,
        )

    def serve_here(self) -> int:
        """Serve in SGLang's own server process; returns its exit status. Raises ValueError."""
        from rayspec.serving.access import check_is_free
        from rayspec.serving.launch import serve

        check_is_free(self.options.host, self.options.port)
        folder = prepared_home() / "serving"
        try:
            if not self.options.no_canary:
                self.try_first(folder)
        except KeyboardInterrupt:
            return INTERRUPTED
        file = folder / f"{self.options.port}.logging.json"
        variables = sglang_variables(self.options.log_format, file, self.about, self.command)
        return serve(self.command, self.access, num_threads=self.champion.record.num_threads, variables=variables)

    def try_first(self, logs: Path) -> None:
        """Raises ValueError for one that may take no traffic."""
        from rayspec.serving.canary_server import answers_of_a_canary, check_promise
        from rayspec.serving.process import ServerFailed

        said = "canary prompts are answered before there is traffic (--no-canary leaves that out); the log lies in %s"
        log.info(said, logs, extra=self.about)
        version = self.serving.version(self.champion, self.source)
        # the evidence is of the promoted draft length; a server may take as long to start as it does without a canary
        version = replace(version, follows_policy=False, start_timeout_s=math.inf)
        try:
            check_promise(self.champion, answers_of_a_canary(version), self.more)
        except ServerFailed as error:
            raise ValueError(f"the canary of {self.champion.name} does not serve: {error}") from error

    def serve_on_ray(self) -> int:
        """Serve on Ray until it is ended. Raises ValueError."""
        from rayspec.serving.cluster import serve_on_ray  # imports Ray Serve

        try:
            with self.following() as following:
                serve_on_ray(self.champion, self.source, self.serving, following)
        except KeyboardInterrupt:
            log.info("ended by Ctrl-C")
            return INTERRUPTED
        return 0

    @contextmanager
    def following(self) -> Iterator["Following | None"]:
        """None without --follow. Raises ValueError where notices cannot be taken."""
        if self.settings is None:
            yield None
            return
        from rayspec.serving.alias import followed
        from rayspec.serving.cluster import Following
        from rayspec.serving.webhook import receiving

        assert self.client is not None, "a folder has no alias"
        alias = followed(self.options.source)
        following = Following(client=self.client, alias=alias, settings=self.settings, standing=self.standing)
        if self.webhook is None:
            yield following
            return
        with receiving(self.webhook, alias) as wait:
            yield replace(following, wait=wait)


def _checked(options: argparse.Namespace, more: list[str]) -> _Asked:
    """Raises ValueError for what may not be served."""
    from rayspec.serving.access import Access
    from rayspec.serving.canary_server import check_words  # imports torch and MLflow
    from rayspec.serving.champion import find_champion, is_folder
    from rayspec.serving.launch import SERVER, server_command
    from rayspec.serving.start import find_start
    from rayspec.tracking import connect
    from sglang_ext.adapter.server_words import check_taken

    scale, settings, webhook = _scale(options), _rollover(options), _webhook(options)
    access = Access.given(options.api_key_file, options.max_body_mib)
    if scale is not None or not options.no_canary:
        check_words(more, on_ray=scale is not None)
    if not options.plan:
        prepared_home()
    client = None if is_folder(options.source) else connect(tracking_uri(), create=False)
    # in full, since Ray's actors look from other folders
    source = options.source if client is not None else str(Path(options.source).resolve())
    if options.target is not None and Path(options.target).is_dir():
        options.target = str(Path(options.target).resolve())
    start = find_start(
        source,
        client,
        lambda source: find_champion(source, client, target=options.target, force=options.force),
        follows=options.follow,
    )
    champion = start.champion
    command = server_command(champion, options.host, options.port, more, follows_policy=not options.no_policy)
    if more:
        check_taken(command[len(SERVER) :])
    return _Asked(
        options, tuple(more), access, client, start.source, champion, command, scale, settings, webhook, start.standing
    )


def _scale(options: argparse.Namespace) -> "Scale | None":
    """How many replicas; None for the server's own process. Raises ValueError."""
    from rayspec.serving.scale import MAX_REPLICAS, Scale

    low, high = options.min_replicas, options.max_replicas
    on_ray = options.follow or any(n is not None for n in (options.replicas, low, high))
    named = [
        n for n in ("requests_each", "scale_down_seconds", "router", "drain_seconds") if getattr(options, n) is not None
    ]
    if not on_ray:
        if named:
            raise ValueError(f"--{named[0].replace('_', '-')} is of Ray Serve, which --replicas or --follow begins")
        return None
    if options.replicas is not None and (low is not None or high is not None):
        raise ValueError("--replicas is a fixed number; leave it out for --min-replicas and --max-replicas")
    if (low is None) != (high is None):
        raise ValueError("--min-replicas and --max-replicas go together")
    of_load = [n for n in ("requests_each", "scale_down_seconds") if getattr(options, n) is not None]
    if of_load and low is None:
        raise ValueError(f"--{of_load[0].replace('_', '-')} goes with --min-replicas and --max-replicas")
    count = 1 if options.replicas is None else options.replicas
    if not 1 <= count <= MAX_REPLICAS:
        raise ValueError(f"--replicas must be in 1..{MAX_REPLICAS}, got {count}")
    given: dict[str, Any] = {
        "requests_each": options.requests_each,
        "router": options.router,
        "drain_s": options.drain_seconds,
        "scale_down_s": options.scale_down_seconds,
    }
    given |= {"minimum": count if low is None else low, "maximum": count if high is None else high}
    return Scale(**{name: value for name, value in given.items() if value is not None})


def _rollover(options: argparse.Namespace) -> "RolloverSettings | None":
    """None without --follow. Raises ValueError."""
    from rayspec.serving.alias import followed
    from rayspec.serving.canary import CanaryBounds
    from rayspec.serving.rollover import RolloverSettings

    given: dict[str, Any] = {"poll_s": options.poll_seconds, "watch_s": options.watch_seconds}
    if options.canary_mismatches is not None:
        given["canary"] = CanaryBounds(mismatches=options.canary_mismatches)
    given = {name: value for name, value in given.items() if value is not None}
    if options.follow:
        followed(options.source)
        return RolloverSettings(**given)
    if given:
        raise ValueError("--poll-seconds, --watch-seconds and --canary-mismatches are of --follow")
    return None


def _webhook(options: argparse.Namespace) -> "WebhookSettings | None":
    """None without --webhook-port. Raises ValueError."""
    if options.webhook_port is None:
        if options.webhook_host is not None:
            raise ValueError("--webhook-host goes with --webhook-port")
        return None
    if not options.follow:
        raise ValueError("--webhook-port wakes what --follow does; add --follow, or leave --webhook-port out")
    if options.webhook_port == options.port:
        raise ValueError(f"--webhook-port must be another than --port, got {options.port} for both")
    from rayspec.serving.access import WEBHOOK_VARIABLE
    from rayspec.serving.webhook import WebhookSettings

    return WebhookSettings(
        host="127.0.0.1" if options.webhook_host is None else options.webhook_host,
        port=options.webhook_port,
        secret=os.environ.get(WEBHOOK_VARIABLE, "").strip(),
    )


def _parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(ours, SGLang's)."""
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]
