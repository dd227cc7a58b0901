"""The applications of `rayspec serve` for Ray Serve's own configuration: `serve deploy`, and KubeRay's RayService
(configs/cluster/rayservice.yaml). Ray calls these functions on the cluster, with `args` of the file.

It deploys and scales; it follows no alias, which is `rayspec serve --follow`'s.
"""

from dataclasses import dataclass, replace
from typing import Any

from ray import serve

from rayspec.home import prepared_home, tracking_uri
from rayspec.serving.access import Access
from rayspec.serving.application import ingress_application, server_application
from rayspec.serving.champion import find_champion, is_folder
from rayspec.serving.logs import FORMATS
from rayspec.serving.scale import Scale
from rayspec.serving.start import find_start
from rayspec.serving.version import served_version
from rayspec.tracking import connect
from sglang_ext.adapter.http_app import DEFAULT_MIB, MAX_MIB
from sglang_ext.settings import Settings, build, require


@dataclass(frozen=True, kw_only=True)
class IngressArgs(Settings):
    """`args` of the ingress's application. The servers' has them, too, since each has a limit and a log of its own."""

    max_body_mib: int = DEFAULT_MIB
    log_format: str = "text"

    def __post_init__(self) -> None:
        require(0 <= self.max_body_mib <= MAX_MIB, "max_body_mib", self.max_body_mib, f"in 0..{MAX_MIB} (0: any size)")
        require(self.log_format in FORMATS, "log_format", self.log_format, f"one of {', '.join(FORMATS)}")


@dataclass(frozen=True, kw_only=True)
class ServiceArgs(IngressArgs):
    """`args` of the servers' application; what they mean, `rayspec serve --help` says. `gpus`: of each replica.
    `canary`: replicas have the canary prompts answered before they take traffic, until the version has passed."""

    source: str
    target: str | None = None
    force: bool = False
    follows_policy: bool = True
    canary: bool = True
    min_replicas: int = Scale.minimum
    max_replicas: int = Scale.maximum
    requests_each: int = Scale.requests_each
    scale_down_s: float = Scale.scale_down_s
    drain_s: float = Scale.drain_s
    router: str = Scale.router
    gpus: float = Scale.gpus

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


def servers(args: dict[str, Any]) -> serve.Application:
    """The replicas of a champion that was checked. Keys are those of the environment, as with `rayspec serve`. Raises
    ValueError, which Ray Serve shows as the application's status."""
    given = build(ServiceArgs, args)
    scale = given.scale
    prepared_home()
    client = None if is_folder(given.source) else connect(tracking_uri(), create=False)
    start = find_start(
        given.source,
        client,
        lambda source: find_champion(source, client, target=given.target, force=given.force),
        follows=False,
    )
    version = served_version(
        start.champion,
        start.source,
        target=given.target,
        force=given.force,
        follows_policy=given.follows_policy,
        more=(),
        tracking_uri=None if client is None else client.tracking_uri,
        access=Access.given(None, given.max_body_mib),
        log_format=given.log_format,
    )
    return server_application(replace(version, tries_first=given.canary), scale, board=None)


def ingress(args: dict[str, Any]) -> serve.Application:
    """What listens, and hands every request on to the servers. Raises ValueError."""
    given = build(IngressArgs, args)
    return ingress_application(given.log_format, given.max_body_mib)
