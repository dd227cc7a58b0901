"""A new SQLite store of MLflow, whole or not at all.

MLflow makes its tables in some fifty steps, and a process that is killed between two of them leaves a file that no
MLflow opens again.
"""

import os
import secrets
from pathlib import Path

import sqlalchemy
from mlflow.store.db.utils import _initialize_tables


def make_sqlite_store(path: Path) -> None:
    """Make the store beside its place and move it there; one that another process has made by then stays."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}.part")
    engine = sqlalchemy.create_engine(f"sqlite:///{draft}")
    try:
        _initialize_tables(engine)
        engine.dispose()
        try:
            os.link(draft, path)  # unlike a renaming it replaces nothing
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not path.exists():
                os.rename(draft, path)
    finally:
        engine.dispose()
        draft.unlink(missing_ok=True)
