"""Files and folders at URLs: copied whole before they are read, and removed at exit.

fsspec reads them through the library of the scheme: `s3://`, `gs://`, `hf://`, `https://` and
others. The copies are in a private folder; they are hashed and checked like local files.
"""

from __future__ import annotations

import glob
import posixpath
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import unquote, urlsplit

from ..errors import (
    CalibrationError,
    CheckpointError,
    FeedError,
    LocationError,
    MissingExtraError,
    MoexportError,
    UsageError,
    install,
)
from .writing import FULL, scratch_until_exit

AnyPlace = str | Path
"""A path or a URL; a URL that was converted to a `Path` has lost its second slash."""

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?=[^/])")

FILE = re.compile(r"file:(?://(?P<host>[^/]*))?(?P<path>.*)", re.IGNORECASE | re.DOTALL)
"""A path as a file: URL."""

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hf", "http": "http"}
EXTRAS |= {"https": "http"}
"""The extra that installs the library of each scheme."""

HUB_PAGE = re.compile(r"https?://huggingface\.co/(?!.*/resolve/)([^/?#]+/[^/?#]+)")
"""The web page of a repository on Hugging Face; URLs of its files contain `resolve`."""

ONE_FILE = ("http", "https")
"""Schemes that cannot list folders."""

CONNECT_S, STALLED_S = 30.0, 60.0
"""Time limits for an HTTP server: until it connects, and between two pieces of data."""

MIN_RATE = 16 << 10
"""Bytes per second that an HTTP server must send on average after `STALLED_S`: a server that sends
a byte now and then would block a run forever."""

ATTEMPTS = 3
"""How often copying a file is tried if the connection breaks."""

UNKNOWN_BYTES = 16 << 30
"""The limit for a file whose size the server does not announce."""

RESERVED_BYTES = 256 << 20
"""Space that the copies leave free on their disk."""

ROOM = "free some space, or name another folder for copies: TMPDIR=/folder"

VERSION = (
    *("size", "ETag", "etag", "Content-MD5", "Digest", "Last-Modified", "LastModified"),
    *("mtime", "created", "modified", "updated", "blob_id"),
)
"""The keys with which file systems report the version of a file's content."""

_COPIES: dict[str, Path] = {}
_LOCK = threading.RLock()
_FOLDERS: list[Path] = []
"""The folder of all copies, once it exists."""


def url_of(where: object) -> str | None:
    """Returns a location as a URL; None for a path, even if it is written `file:///…`."""
    text = str(where) if isinstance(where, str | Path) else ""
    match = URL.match(text)
    if match is None or FILE.match(text) or Path(text).exists():
        return None
    return f"{match[1]}://{text[match.end() :]}".rstrip("/")


def is_missing(where: AnyPlace) -> bool:
    """Whether a path does not exist; URLs are not looked up."""
    return url_of(where) is None and not path_of(where).exists()


def is_missing_checkpoint(where: AnyPlace) -> bool:
    """Whether neither a path nor any file with this path as a prefix exists.

    Some formats name a checkpoint by the prefix of its files: `PREFIX.index`, `PREFIX.data-…`.
    """
    path = path_of(where)
    return is_missing(where) and not any(path.parent.glob(f"{glob.escape(path.name)}.*"))


def no_such_checkpoint(source: Path) -> CheckpointError:
    """Returns the error for a missing checkpoint.

    A name that looks like an id on Hugging Face gets a hint, because only URLs are downloaded.
    """
    text, hint = source.as_posix(), "check the path"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not source.suffix and not source.parent.exists():
        hint = (
            f"if this is a model on Hugging Face, give hf://{text}, or download it first: "
            f"`hf download {text} --local-dir {source.name}`"
        )
    return CheckpointError(f"{source}: no such file", hint=hint)


def no_such_table(path: Path) -> CalibrationError:
    """Returns the error for a missing calibration table."""
    hint = "`moexport calibrate MODEL --data FEED -o table.json` writes one"
    return CalibrationError(f"{path}: no such calibration table", hint=hint)


def no_such_feed(where: str) -> FeedError:
    """Returns the error for a missing feed."""
    return FeedError(
        f"{where}: no such feed",
        hint="a feed is an .npz file, a folder of .npy files, shards (.tar, .parquet) or "
        "package.module:iterable",
    )


def path_of(where: AnyPlace) -> Path:
    """Returns the path of a location that is not a URL: `/a b.pt` for `file:///a%20b.pt`.

    Raises `LocationError` for a file: URL of another machine, `UsageError` if it is not a path.
    """
    if not isinstance(where, str | PathLike):
        raise UsageError(f"{where!r:.60}: not a path", hint="give a string or a pathlib.Path")
    match = FILE.fullmatch(str(where))
    if match is None or Path(where).exists():
        return Path(where)
    if match["host"] not in (None, "", "localhost") or not match["path"]:
        raise LocationError(
            f"{where}: this URL does not name a path on this machine",
            hint="file:///folder/name (three slashes), or the path alone",
        )
    return Path(unquote(match["path"]))


def local(where: AnyPlace) -> Path:
    """Returns the path of a file or folder; for a URL, its copy, made once per process.

    Raises `LocationError` on failure, `MissingExtraError` if the scheme's library is missing.
    """

    def copy(system: Any, path: str, url: str, target: Path) -> None:
        if not _is_folder(url, system, path):
            _copy(system, path, target)
            return
        for name in _listed(system, path):
            _copy(system, f"{path}/{name}", _inside(target, name, url))

    return _copied_once(where, copy)


def local_files(where: AnyPlace, names: Callable[[Path], Iterable[str]], *first: str) -> Path:
    """Returns a folder; for a URL, a copy with the files `first` and those that `names` then lists.

    It also works with servers that cannot list folders. Missing files are skipped: the reader of
    the folder reports them.
    """

    def copy(system: Any, path: str, url: str, target: Path) -> None:
        target.mkdir(exist_ok=True)
        _copy_existing(system, path, first, target, url)
        _copy_existing(system, path, names(target), target, url)

    return _copied_once(where, copy)


def _copied_once(where: AnyPlace, copy: Callable[[Any, str, str, Path], None]) -> Path:
    """Returns a path; for a URL, the path of its copy, which `copy` makes on the first use."""
    url = url_of(where)
    if url is None:
        return path_of(where)
    with _LOCK:
        if url not in _COPIES:
            with _reading(url) as (system, path):
                target = _new_target(url)
                copy(system, path, url, target)
            _COPIES[url] = target
        return _COPIES[url]


def copy_siblings(where: AnyPlace, names: Iterable[str]) -> None:
    """Copies the named files next to a URL's file, if they exist; does nothing for a path."""
    url = url_of(where)
    if url is None:
        return
    copy = local(where)
    with _reading(url.rpartition("/")[0]) as (system, path):
        _copy_existing(system, path, names, copy.parent, url)


def has_file(where: AnyPlace, name: str) -> bool:
    """Whether a folder, given as a path or a URL, contains a file of this name."""
    url = url_of(where)
    if url is None:
        return (path_of(where) / name).is_file()
    with _reading(url) as (system, path):
        return bool(system.exists(f"{path}/{name}", **_time_limit(system)))


def state_of(where: object) -> str:
    """Returns a string that changes when a file, folder or URL changes; empty for other inputs.

    It contains the sizes and modification times of files, or the server's version of a URL.
    """
    url = url_of(where)
    if url is not None:
        with _reading(url) as (system, path):
            if _is_folder(url, system, path):
                names = _listed(system, path)
            else:
                bundle = system.exists(f"{path}/manifest.json", **_time_limit(system))
                names = ["manifest.json"] if bundle else []
            paths = [f"{path}/{name}" for name in names] or [path]
            system.invalidate_cache()
            infos = [system.info(each, **_time_limit(system)) for each in paths]
            # For HTTP, fsspec's "key" of a file is only its URL, independent of the content.
            return " ".join(entry for info in infos for entry in (info["name"], *_version(info)))
    if not isinstance(where, str | Path) or not (local_path := path_of(where)).exists():
        return ""
    files = [local_path]
    if local_path.is_dir():
        files = sorted(file for file in local_path.rglob("*") if file.is_file())
    states = ((str(file), file.stat()) for file in files)
    return " ".join(f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in states)


@contextmanager
def named_by_url() -> Iterator[None]:
    """Within the block, errors name URLs instead of their copies."""
    try:
        yield
    except MoexportError as error:
        error.message = with_urls(error.message)
        error.hint = None if error.hint is None else with_urls(error.hint)
        error.args = (error.message,)
        raise


def with_urls(text: str) -> str:
    """Returns a text in which URLs replace the paths of their copies."""
    for url, copy in _COPIES.items():
        text = text.replace(str(copy), url)
    return text


def _new_target(url: str) -> Path:
    """Returns the path for the copy of a URL: its last part, in a new folder."""
    if not _FOLDERS:
        _FOLDERS.append(scratch_until_exit("downloads"))
    folder = Path(mkdtemp(dir=_FOLDERS[0]))
    name = posixpath.basename(unquote(urlsplit(url).path)) or urlsplit(url).netloc
    return _inside(folder, name, url)


def _inside(folder: Path, name: str, url: str) -> Path:
    """Returns the path of a file in a folder; raises `LocationError` if it would be outside."""
    parts = name.split("/")
    if not name or {"", ".", ".."} & {*parts} or re.search(r"[\\:\x00]", name):
        raise LocationError(f"{url} contains a file that cannot be copied: its name is {name!r}")
    return folder.joinpath(*parts)


def _is_folder(url: str, system: Any, path: str) -> bool:
    return urlsplit(url).scheme not in ONE_FILE and bool(system.isdir(path))


def _listed(system: Any, path: str) -> list[str]:
    root = system._strip_protocol(path).rstrip("/")
    paths = (system._strip_protocol(entry) for entry in system.find(path))
    return sorted(entry.removeprefix(root).lstrip("/") for entry in paths)


def _copy_existing(system: Any, path: str, names: Iterable[str], folder: Path, url: str) -> None:
    for name in names:
        target = _inside(folder, name, url)
        if not target.exists() and system.exists(f"{path}/{name}", **_time_limit(system)):
            _copy(system, f"{path}/{name}", target)


def _copy(system: Any, path: str, target: Path) -> None:
    """Copies a file; retries if the transfer fails or the file changes. Leaves no partial copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in reversed(range(ATTEMPTS)):
        try:
            _copy_once(system, path, target)
        except (MoexportError, FileNotFoundError, PermissionError, TimeoutError):
            target.unlink(missing_ok=True)
            raise
        except Exception as error:
            target.unlink(missing_ok=True)
            final = getattr(error, "status", 500) < 500 or getattr(error, "errno", None) in FULL
            if final or not left:
                raise
        else:
            return


def _copy_once(system: Any, path: str, target: Path) -> None:
    """Copies a file, checking the announced size and the space on the disk."""
    from fsspec.callbacks import Callback

    url = system.unstrip_protocol(path)
    before = system.info(path, **_time_limit(system))
    length = before.get("size")
    free = max(0, shutil.disk_usage(target.parent).free - RESERVED_BYTES)
    if length is not None and length > free:
        raise LocationError(
            f"{url} has {length} bytes, but only {free} are free in {target.parent}", hint=ROOM
        )
    max_bytes = min(free, UNKNOWN_BYTES) if length is None else length

    started = time.monotonic()

    def check_progress(size: int | None, value: int, **_: object) -> None:
        took = time.monotonic() - started
        if "http" in system.protocol and value < MIN_RATE * (took - STALLED_S):
            raise LocationError(
                f"{url}: only {value} bytes arrived in {took:.0f} s, less than {MIN_RATE} a second",
                hint="download it with a program that can resume, and give its path",
            )
        if value > max_bytes:
            limit = "it announced" if length is not None else "are allowed if the size is unknown"
            raise LocationError(
                f"{url}: the server sends more than the {max_bytes} bytes that {limit}", hint=ROOM
            )

    limit = _time_limit(system, 2 * STALLED_S + max_bytes / MIN_RATE)
    system.get_file(path, str(target), callback=Callback(hooks={"limit": check_progress}), **limit)
    copied = target.stat().st_size
    if length is not None and copied != length:
        raise EOFError(f"only {copied} of {length} bytes arrived")
    system.invalidate_cache(path)
    if _version(system.info(path, **_time_limit(system))) != _version(before):
        raise EOFError("it changed while it was being copied")


def _version(info: Mapping[str, Any]) -> list[str]:
    """Returns the size, hash and time of a file, as the server reports them."""
    return [f"{key} {info[key]}" for key in VERSION if info.get(key) is not None]


def _options(scheme: str) -> dict[str, Any]:
    """Returns options for fsspec: time limits for HTTP, and no decompression.

    If replies were decompressed, a small one could unpack to any size.
    """
    if scheme not in ONE_FILE:
        return {}
    import aiohttp
    import fsspec

    settings = fsspec.config.conf.get(scheme, {})
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=STALLED_S)
    client = {**settings.get("client_kwargs", {}), "timeout": timeout, "auto_decompress": False}
    return {
        "client_kwargs": client,
        "headers": {**settings.get("headers", {}), "Accept-Encoding": "identity"},
    }


def _time_limit(system: Any, seconds: float | None = None) -> dict[str, Any]:
    """Returns the time limit for a whole HTTP call, because headers may arrive slowly as well."""
    if "http" not in system.protocol:
        return {}
    return {"timeout": 2 * STALLED_S if seconds is None else seconds}


@contextmanager
def _reading(url: str) -> Iterator[tuple[Any, str]]:
    """Yields the file system of a URL and the path in it; errors name the URL."""
    scheme = urlsplit(url).scheme
    if (page := HUB_PAGE.match(url)) is not None:
        raise LocationError(
            f"{url}: a web page of Hugging Face, not a file of a model",
            hint=f"give hf://{page[1]}, or download it first: `hf download {page[1]}`",
        )
    try:
        import fsspec

        yield fsspec.core.url_to_fs(url, **_options(scheme))
    except MoexportError:
        raise
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        raise MissingExtraError(
            f"{url}: {scheme}:// needs a library that is not installed ({error})",
            hint=install(extra) if extra else f"fsspec reports: {error}",
        ) from error
    except PermissionError as error:
        raise LocationError(f"{url}: access is denied ({error})", hint=CREDENTIALS) from error
    except Exception as error:  # each library has its own exceptions
        # fsspec's HTTP reports every failure as a missing file; the cause is more precise.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
        status = getattr(cause, "status", None)
        if cause is None or status in (404, 410):
            raise LocationError(f"{url}: no such file", hint="check the URL") from error
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        if isinstance(cause, TimeoutError):
            reason = f"no data arrived for {STALLED_S:.0f} s, or the transfer was too slow"
        denied = status in (401, 403) or "redential" in str(cause)
        raise LocationError(
            f"{url}: cannot be read ({reason})", hint=CREDENTIALS if denied else None
        ) from error


CREDENTIALS = "log in with the scheme's own library; docs/scale-out.md#urls lists the libraries"
