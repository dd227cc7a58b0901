"""Which version an alias is started with: what it means, unless a roll-over has refused that or did not end."""

from collections.abc import Callable
from dataclasses import dataclass

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from rayspec.serving.alias import pinned_source
from rayspec.serving.champion import MODEL, Champion
from rayspec.serving.events import Standing, read_standing, standing_tag
from rayspec.serving.logs import log
from rayspec.tracking import TrackingError, redacted, said

Find = Callable[[str], Champion]  # by its source; raises ValueError for one that may take no traffic


@dataclass(frozen=True, kw_only=True)
class Start:
    """`source` is never an alias. `standing`: why it is the version before the one that the alias means; else None."""

    champion: Champion
    source: str
    standing: Standing | None = None


def find_start(source: str, client: MlflowClient | None, find: Find, *, follows: bool) -> Start:
    """What `source` means. Of an alias that a roll-over has left: with `follows` the version before one that was
    refused, rolled back or not watched to the end, which is then tried as any other. Without, one that was refused or
    rolled back is not served.

    Raises ValueError where it may not take traffic, TrackingError where MLflow does not have it.
    """
    if client is None:
        return Start(champion=find(source), source=source)
    pinned, standing = pinned_source(source, client), _standing(source, client)
    version = pinned.rpartition("/")[2]
    if standing is None or standing.tried != version:
        return Start(champion=find(pinned), source=pinned)
    before = f"{pinned.rpartition('/')[0]}/{standing.kept}"
    said = f"{source} means version {version}, and {standing.told}"
    way_out = (
        f"move the alias, serve it by its number ({pinned}, without --follow), or delete the model's tag "
        f"{standing_tag(source.rpartition('@')[2])} to have it tried again"
    )
    if not follows and standing.is_refused:
        raise ValueError(f"{said}; {way_out}")
    if follows:
        try:
            champion = find(before)
        except ValueError as error:
            said = f"{said}; version {standing.kept}, which was there before, cannot be served: {error}"
            if standing.is_refused:
                raise ValueError(f"{said}; {way_out}") from error
        else:
            then = "until the alias moves" if standing.is_refused else f"until version {version} has been tried again"
            log.warning("%s; version %s is served %s", said, standing.kept, then)
            return Start(champion=champion, source=before, standing=standing)
    log.warning("%s; it is served all the same", said)
    return Start(champion=find(pinned), source=pinned)


def _standing(source: str, client: MlflowClient) -> Standing | None:
    """The standing of the alias that `source` names; None for a source that names no alias."""
    model = MODEL.fullmatch(source)
    if model is None or model["alias"] is None:
        return None
    try:
        return read_standing(client, model["name"], model["alias"])
    except MlflowException as error:
        uri = client.tracking_uri
        raise TrackingError(f"MLflow at {redacted(uri)} has no {source}: {said(error, uri)}") from error
