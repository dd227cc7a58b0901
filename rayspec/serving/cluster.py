"""`rayspec serve` on Ray Serve: the ingress and the replicas of a champion, and with `--follow` what puts in the next.

A cluster of ours (no RAY_ADDRESS) lives as long as the command. On a cluster of others the applications are deleted
when the command ends, after what runs has been answered; those that a killed command has left are taken over.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from mlflow import MlflowClient
from ray import serve
from ray.exceptions import GetTimeoutError, RayError

from rayspec.farm.actor import cluster, node_gpus
from rayspec.farm.processes import environment
from rayspec.farm.ranks import ranks_of
from rayspec.home import artifact_uri
from rayspec.messages import first_line
from rayspec.serving import kinds
from rayspec.serving.alias import MlflowRegistry
from rayspec.serving.canary import Answer
from rayspec.serving.canary_actor import canary_on_ray, outages_postpone
from rayspec.serving.champion import Champion, find_champion
from rayspec.serving.deployed import NO_PROMPT, deploy, deployed, put_in
from rayspec.serving.events import Events, Standing
from rayspec.serving.figures import Totals
from rayspec.serving.ingress import DEPLOYMENT, SERVERS
from rayspec.serving.launch import ADAPTIVE, meant_by, other_shape
from rayspec.serving.logs import log
from rayspec.serving.proxy import VARIABLES
from rayspec.serving.rollover import Postponed, Rollover, RolloverSettings
from rayspec.serving.scale import Scale
from rayspec.serving.start import Find
from rayspec.serving.version import ServedVersion, Serving
from rayspec.tracking import UNREACHABLE, is_refusal

ASK_TIMEOUT_S = 600.0
BOARD_TIMEOUT_S = 10.0
EXPERIMENT = "rollover"  # for a champion whose version names no run


@dataclass(frozen=True, kw_only=True)
class Following:
    """What puts in the versions that `alias` (model, alias) comes to mean. `wait`: see `Rollover.run`."""

    client: MlflowClient
    alias: tuple[str, str]
    settings: RolloverSettings
    wait: Callable[[float], object] = time.sleep
    standing: Standing | None = None  # where the version before the alias's is started, see `Start`


def serve_on_ray(champion: Champion, source: str, serving: Serving, following: Following | None) -> None:
    """Serve until an exception (SystemExit, KeyboardInterrupt) ends it, and follow an alias meanwhile.

    `source` names a version, not an alias. Raises ValueError where the servers do not start.
    """
    replicas = 2 * serving.scale.maximum + 1  # beside old ones, new ones while they start
    is_ours = not (ray.is_initialized() or os.environ.get("RAY_ADDRESS"))
    with environment(VARIABLES), cluster(None, min_cpus=math.ceil(replicas * serving.scale.cpus) + 1):
        serving = replace(serving, scale=_with_resources(serving.scale, champion, serving.more))
        _check_room(serving.scale, may_grow=not is_ours)
        find = None if following is None else _finder(following, serving)
        with deployed(champion, source, serving, find) as (board, champion, source):
            about = {"version": champion.name, "port": serving.port}
            log.info("serving %s on http://%s:%d", champion.name, serving.host, serving.port, extra=about)
            if following is None:
                _wait()
            else:
                follow(champion, source, serving, following, board)


def _finder(following: Following, serving: Serving) -> Find:
    """The lookup of a version left under traffic, which is not to stay if another one is started in its place."""

    def find(source: str) -> Champion:
        standing, version = following.standing, source.rpartition("/")[2]
        if standing is not None and version != standing.kept:
            raise ValueError(standing.told if version == standing.tried else f"version {version} was never kept")
        return find_champion(source, following.client, target=serving.target, force=serving.force)

    return find


def follow(champion: Champion, source: str, serving: Serving, following: Following, board: Any) -> None:
    """Never returns."""
    client, settings, (model, alias) = following.client, following.settings, following.alias
    version = source.rpartition("/")[2]
    standing = following.standing or Standing(kept=version)
    wait = partial(following.wait, settings.poll_s)
    events = _events(client, following.alias, version, standing, wait, board.count.remote)
    stage = RayStage(model, client, serving, board, serving.version(champion, source))
    try:
        events.record(kinds.STARTED, version, f"alias {alias} is looked at every {settings.poll_s:g} s")
        registry = MlflowRegistry(client, model, alias)
        refused = standing.tried if standing.is_refused else None
        running = _as_served(champion, serving)
        Rollover(running, version, registry, stage, events, settings, refused=refused).run(following.wait)
    finally:
        events.end()


class RayStage:
    """Replicas and canaries of one model on the connected cluster."""

    def __init__(self, model: str, client: MlflowClient, serving: Serving, board: Any, live: ServedVersion) -> None:
        self._model, self._client, self._serving, self._board = model, client, serving, board
        self._live, self._live_scale = live, serving.scale
        self._versions = {live.folder: live}  # a roll-back needs no files of a version that are gone from here by then
        self._is_counted = True  # as far as is known
        self.follows_policy, self.adapts = serving.follows_policy, bool(meant_by(serving.more, ADAPTIVE))

    def check(self, version: str) -> Champion:
        with outages_postpone():
            serving = self._serving
            found = find_champion(self._source(version), self._client, target=serving.target, force=serving.force)
            return _as_served(found, serving)

    def canary(self, champion: Champion, version: str) -> list[Answer]:
        scale = _with_resources(self._serving.scale, champion, self._serving.more)
        return canary_on_ray(self._version(champion, version), scale)

    def running_answers(self) -> list[Answer]:
        handle = serve.get_deployment_handle(DEPLOYMENT, SERVERS)
        try:
            answers: list[Answer] = handle.canary_answers.remote(NO_PROMPT).result(timeout_s=ASK_TIMEOUT_S)
            return answers
        except Exception as error:  # whatever it is, the version that is tried has no part in it
            raise Postponed(
                f"the running version did not answer the canary prompts ({type(error).__name__})"
            ) from error

    def put_in(self, champion: Champion, version: str) -> None:
        new = self._version(champion, version)
        scale = _with_resources(self._serving.scale, champion, self._serving.more)
        try:
            put_in(new, scale, self._board)
        except Exception:  # whatever it is, the version before comes back; what is left of it goes on meanwhile
            deploy(self._live, self._live_scale, self._board)
            raise
        self._live, self._live_scale = new, scale

    def totals(self, champion: Champion) -> Totals | None:
        try:
            found: Totals = ray.get(self._board.totals.remote(champion.name), timeout=BOARD_TIMEOUT_S)
        except (RayError, GetTimeoutError) as error:
            if self._is_counted:
                log.warning(
                    "the counters of the replicas cannot be read (%s), so no version is watched meanwhile; if that "
                    "stays so, start rayspec serve again",
                    type(error).__name__,
                )
            self._is_counted = False
            return None
        self._is_counted = True
        return found

    def _version(self, champion: Champion, version: str) -> ServedVersion:
        folder = champion.folder.name  # has the fingerprint in it
        if folder not in self._versions:
            self._versions[folder] = self._serving.version(champion, self._source(version))
        return self._versions[folder]

    def _source(self, version: str) -> str:
        return f"models:/{self._model}/{version}"


def _as_served(champion: Champion, serving: Serving) -> Champion:
    """Without evidence where SGLang's own flags set another draft length than it was measured with."""
    return replace(champion, record=champion.record.without_evidence()) if other_shape(serving.more) else champion


def _with_resources(scale: Scale, champion: Champion, more: Sequence[str]) -> Scale:
    """What a server needs: its ranks' GPUs where the cluster has any, else its threads."""
    ranks = ranks_of(champion.record.flags, more)
    return replace(scale, gpus=float(ranks)) if max(node_gpus(), default=0) > 0 else scale


def _check_room(scale: Scale, *, may_grow: bool) -> None:
    """Raises ValueError where the GPUs do not hold the replicas, for which Ray would wait without a word; a warning of
    a cluster that may grow."""
    if not scale.gpus:
        return
    gpus = node_gpus()
    held = sum(int(of_node // scale.gpus) for of_node in gpus)
    if held >= scale.minimum:
        return
    said = (
        f"{scale.minimum} replica(s) of {scale.gpus:g} GPU(s) each do not fit onto the {sum(gpus):g} GPU(s) of the "
        f"cluster's nodes, which hold {held}"
    )
    if not may_grow:
        raise ValueError(
            f"{said}; lower --replicas (or --min-replicas) or the ranks of each (--tp-size behind --), or serve on a "
            "cluster with more (RAY_ADDRESS)"
        )
    log.warning("%s; nothing listens until it has grown", said)


def _events(
    client: MlflowClient,
    alias: tuple[str, str],
    version: str,
    standing: Standing,
    wait: Callable[[], object],
    count: Callable[[str], object] = lambda event: None,
) -> Events:
    """The events, as soon as MLflow takes them; serving does not wait for it. Without a run where it refuses one."""
    while True:
        try:
            return Events(client, alias, _experiment(client, alias[0], version), standing, count)
        except UNREACHABLE as error:
            if is_refusal(error):
                log.warning(
                    "MLflow refuses a run for the events of roll-overs (%s); the alias is followed without one, and "
                    "events are on stdout. Restore the experiment, or let this login write, and start again",
                    first_line(error),
                )
                return Events(client, alias, None, standing, count)
            log.warning("MLflow takes no events of a roll-over yet (%s); it is asked again", first_line(error))
            wait()


def _experiment(client: MlflowClient, model: str, version: str) -> str:
    """The experiment of the champion's own run, or one of the name `rollover`."""
    run_id = client.get_model_version(model, version).run_id
    if run_id:
        return str(client.get_run(run_id).info.experiment_id)
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    place = artifact_uri()
    return str(client.create_experiment(EXPERIMENT, artifact_location=f"{place}/{EXPERIMENT}" if place else None))


def _wait(sleep: Callable[[float], None] = time.sleep) -> None:
    while True:
        sleep(3600)
