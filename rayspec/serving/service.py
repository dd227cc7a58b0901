"""The applications of `rayspec serve` for Ray Serve's own configuration: `serve deploy`, and KubeRay's RayService
(configs/cluster/rayservice.yaml). Ray calls these functions on the cluster, with `args` of the file.

It deploys and scales; it follows no alias, which is `rayspec serve --follow`'s.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray import serve

from rayspec.farm.ranks import ranks_of
from rayspec.home import prepared_home, set_login_apart, tracking_uri
from rayspec.serving.access import Access
from rayspec.serving.application import ingress_application, server_application
from rayspec.serving.canary_server import check_words
from rayspec.serving.champion import Champion, find_champion, is_folder
from rayspec.serving.launch import SERVER, server_command
from rayspec.serving.logs import FORMATS
from rayspec.serving.process import LOOPBACK, PORTS
from rayspec.serving.scale import ROUTERS, Scale
from rayspec.serving.start import find_start
from rayspec.serving.version import logger, served_version
from rayspec.tracking import connect
from sglang_ext.adapter.http_app import DEFAULT_MIB, MAX_MIB
from sglang_ext.adapter.server_words import check_taken
from sglang_ext.settings import Settings, T, build, require


@dataclass(frozen=True, kw_only=True)
class IngressArgs(Settings):
    """`args` of the ingress's application. The servers' has them, too, since each has a limit and a log of its own."""

    max_body_mib: int = DEFAULT_MIB
    log_format: str = "text"
    drain_s: float = Scale.drain_s
    router: str = Scale.router

    def __post_init__(self) -> None:
        require(0 <= self.max_body_mib <= MAX_MIB, "max_body_mib", self.max_body_mib, f"in 0..{MAX_MIB} (0: any size)")
        require(self.log_format in FORMATS, "log_format", self.log_format, f"one of {', '.join(FORMATS)}")
        try:
            _ = self.scale
        except ValueError as error:  # in the words of the command line
            raise ValueError(re.sub("--[a-z-]+", _as_argument, str(error))) from error

    @property
    def scale(self) -> Scale:
        return Scale(router=self.router, drain_s=self.drain_s)


@dataclass(frozen=True, kw_only=True)
class ServiceArgs(IngressArgs):
    """`args` of the servers' application; what they mean, `rayspec serve --help` says. `flags`: SGLang's own, as behind
    its --. `gpus`: of each replica. `canary`: replicas have the canary prompts answered before they take traffic, until
    the version has passed."""

    source: str
    flags: list[str] = field(default_factory=list)
    target: str | None = None
    force: bool = False
    follows_policy: bool = True
    canary: bool = True
    min_replicas: int = Scale.minimum
    max_replicas: int = Scale.maximum
    requests_each: int = Scale.requests_each
    scale_down_s: float = Scale.scale_down_s
    gpus: float = Scale.gpus

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.target != "", "target", self.target, "a folder or a name, or left out")
        is_whole = self.gpus == int(self.gpus)
        allowed = "0, a part of one GPU or a whole number of them"
        require(0 <= self.gpus <= 1 or (self.gpus > 1 and is_whole), "gpus", self.gpus, allowed)

    @property
    def scale(self) -> Scale:
        return Scale(
            minimum=self.min_replicas,
            maximum=self.max_replicas,
            requests_each=self.requests_each,
            scale_down_s=self.scale_down_s,
            drain_s=self.drain_s,
            router=self.router,
            gpus=self.gpus,
        )


def _as_argument(flag: re.Match[str]) -> str:
    return flag[0].removeprefix("--").replace("-", "_").replace("_seconds", "_s")


def servers(args: dict[str, Any]) -> serve.Application:
    """The replicas of a champion that was checked. Keys are those of the environment, as with `rayspec serve`. Raises
    ValueError, which Ray Serve shows as the application's status."""
    given = _given(ServiceArgs, args)
    check_words(given.flags, on_ray=True)
    prepared_home()
    set_login_apart()  # of this process, which no job has set up
    client = None if is_folder(given.source) else connect(tracking_uri(), create=False)
    start = find_start(
        given.source,
        client,
        lambda source: find_champion(source, client, target=given.target, force=given.force),
        follows=False,
    )
    _check(start.champion, given)
    if start.source != given.source:
        logger.warning(
            "%s means %s now, and Ray Serve looks no further until the args change: name the version in source",
            given.source,
            start.source,
        )
    version = served_version(
        start.champion,
        start.source,
        target=given.target,
        force=given.force,
        follows_policy=given.follows_policy,
        more=given.flags,
        tracking_uri=None if client is None else client.tracking_uri,
        access=Access.given(None, given.max_body_mib),
        log_format=given.log_format,
    )
    if ROUTERS[given.router] is not None:
        logger.warning("router %s goes by what the ingress reads: give its args the same router", given.router)
    return server_application(replace(version, tries_first=given.canary), given.scale, board=None)


def ingress(args: dict[str, Any]) -> serve.Application:
    """What listens, and hands every request on to the servers. Raises ValueError."""
    given = _given(IngressArgs, args)
    return ingress_application(given.log_format, given.max_body_mib, given.router, given.drain_s)


def _given(kind: type[T], args: Any) -> T:
    require(isinstance(args, Mapping), "args", args, "a mapping, {key: value}")
    return build(kind, args)


def _check(champion: Champion, given: ServiceArgs) -> None:
    """Raises ValueError for arguments with which it cannot be served."""
    command = server_command(champion, LOOPBACK, PORTS[0], given.flags, follows_policy=given.follows_policy)
    if given.flags:
        check_taken(command[len(SERVER) :])
    ranks = ranks_of(champion.record.flags, given.flags)
    if 0 < given.gpus < ranks and ranks > 1:
        raise ValueError(
            f"gpus must be at least {ranks}, the ranks that {champion.name} is served with (tp_size x pp_size x "
            f"dp_size), or 0 without GPUs, got {given.gpus:g}"
        )
