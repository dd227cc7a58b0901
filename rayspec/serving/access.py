"""Who may ask a server for what, and how large a request may be."""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from sglang_ext.adapter.http_app import DEFAULT_MIB, VARIABLE

KEY_VARIABLE = "RAYSPEC_API_KEY"
ADMIN_VARIABLE = "RAYSPEC_ADMIN_KEY"
WEBHOOK_VARIABLE = "RAYSPEC_WEBHOOK_SECRET"  # what MLflow signs its notices to --follow with
SECRETS = (KEY_VARIABLE, ADMIN_VARIABLE, WEBHOOK_VARIABLE)


@dataclass(frozen=True, kw_only=True)
class Access:
    """`key`: what requests must carry; None: anybody's are answered. `admin_key`: what those must carry that change the
    server (weights, settings, pauses), since what they load was not checked; None: nobody has it."""

    key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    max_body_mib: int = DEFAULT_MIB  # 0: no limit

    @classmethod
    def given(cls, key_file: str | None, max_body_mib: int) -> "Access":
        """The access that command line and environment give. Raises ValueError for a key that is empty or no word."""
        given = cls(key=api_key(key_file), admin_key=_of_environment(ADMIN_VARIABLE), max_body_mib=max_body_mib)
        if given.key is not None and given.key == given.admin_key:
            raise ValueError(
                f"{ADMIN_VARIABLE} must be another key than that of requests, or every client could change the server"
            )
        return given

    def environment(self, num_threads: int | None, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Variables of the server's process: no key is among them."""
        own = {name: value for name, value in variables.items() if name not in SECRETS}
        own[VARIABLE] = str(self.max_body_mib)
        return own if num_threads is None else own | {"OMP_NUM_THREADS": str(num_threads)}

    @contextlib.contextmanager
    def with_keys(self, command: Sequence[str]) -> Iterator[tuple[list[str], Path]]:
        """The words of the command that takes the keys from a file which only its user can read, for as long as the
        block, and the folder of that file, which is the server's own: so the keys are in no list of processes."""
        keys = {"admin-api-key": self.admin_key or secrets.token_hex(32)}
        keys |= {"api-key": self.key} if self.key is not None else {}
        with TemporaryDirectory() as folder:
            secret = Path(folder) / "secret.yaml"
            secret.touch(mode=0o600)
            secret.write_text(yaml.safe_dump(keys))
            yield [*command, "--config", str(secret)], Path(folder)


def check_address(host: str, port: int, option: str = "") -> None:
    """Raises ValueError for what nothing can listen on; `option`: what --host and --port are called with before."""
    if not 1 <= port <= 65535:
        raise ValueError(f"--{option}port must be in 1..65535, got {port}")
    try:
        if not host:
            raise OSError("it is empty")
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--{option}host must be an address of this machine or a name of one, got {host!r} ({error})"
        ) from error


def check_is_free(host: str, port: int) -> None:
    """Raises ValueError where this machine cannot listen there."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ValueError(
                f"nothing can listen on --host {host} --port {port} ({error.strerror or error}); name an address of "
                "this machine and a port that is free"
            ) from error


def api_key(file: str | None) -> str | None:
    """The key that requests must carry: of a file, or of the environment. Raises ValueError for an empty one."""
    if file is None:
        return _of_environment(KEY_VARIABLE)
    try:
        return _checked(Path(file).read_text(), file)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {file} cannot be read ({error})") from error


def _of_environment(variable: str) -> str | None:
    text = os.environ.get(variable)
    return None if text is None else _checked(text, variable)


def _checked(text: str, source: str) -> str:
    key = text.strip()
    # a header is ASCII, and a word that begins with a dash is an option to SGLang
    if not key or not key.isascii() or not key.isprintable() or " " in key or key.startswith("-"):
        raise ValueError(
            f"the key of {source} must be one word of printable ASCII characters that is not empty and does not begin "
            "with a dash"
        )
    return key
