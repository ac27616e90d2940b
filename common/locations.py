"""Files and folders that a URL names: copied whole before they are read, and removed at exit.

fsspec reads them, through the library of the scheme: `s3://`, `gs://`, `hf://`, `https://` and all
others that it knows. The copies lie in a folder that nobody else may read, and are hashed and
checked there as local files are.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import unquote, urlsplit

from ..errors import LocationError, MissingExtraError, MoexportError, install
from .writing import FULL, scratch_until_exit

AnyPlace = str | Path
"""A path or a URL; of a path that was made of a URL the second slash is missing."""

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?=[^/])")

FILE = re.compile(r"file:(?://(?P<host>[^/]*))?(?P<path>.*)", re.IGNORECASE | re.DOTALL)
"""A path, written as a URL."""

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hf", "http": "http"}
EXTRAS |= {"https": "http"}
"""The extra that brings the library of a scheme."""

HUB_PAGE = re.compile(r"https?://huggingface\.co/(?!.*/resolve/)([^/?#]+/[^/?#]+)")
"""A web page that shows a repository of Hugging Face; the URLs of its files have `resolve`."""

ONE_FILE = ("http", "https")
"""Schemes that list no folders."""

CONNECT_S, STALLED_S = 30.0, 60.0
"""So long a server of HTTP may take to answer, and to send nothing."""

SLOWEST = 16 << 10
"""Bytes that a server of HTTP sends in a second at least, after `STALLED_S`: one that sends a byte
now and then would hold a run for ever."""

ATTEMPTS = 3
"""To copy a file which breaks off."""

UNTOLD_BYTES = 16 << 30
"""What a file may have whose server does not say how many bytes will come."""

ROOM_BYTES = 256 << 20
"""This stays free on the disk of the copies."""

ROOM = "free some space, or name another folder for copies: TMPDIR=/folder"

VERSION = (
    *("size", "ETag", "etag", "Content-MD5", "Digest", "Last-Modified", "LastModified"),
    *("mtime", "created", "modified", "updated", "blob_id"),
)
"""What file systems call that which changes with a file's content."""

_COPIES: dict[str, Path] = {}
_LOCK = threading.RLock()
_FOLDERS: list[Path] = []
"""The folder of all copies, once there is one."""


def url_of(where: object) -> str | None:
    """Returns the URL that a place is, None for a path, which may be written `file:///…`."""
    text = str(where) if isinstance(where, str | Path) else ""
    match = URL.match(text)
    if match is None or FILE.match(text) or Path(text).exists():
        return None
    return f"{match[1]}://{text[match.end() :]}".rstrip("/")


def path_of(where: AnyPlace) -> Path:
    """Returns the path that a place is which is no URL: `/a b.pt` for `file:///a%20b.pt`.

    Raises `LocationError` for a file of another machine.
    """
    match = FILE.fullmatch(str(where))
    if match is None or Path(where).exists():
        return Path(where)
    if match["host"] not in (None, "", "localhost") or not match["path"]:
        raise LocationError(
            f"{where}: no path of this machine follows file:",
            hint="file:///folder/name (three slashes), or the path alone",
        )
    return Path(unquote(match["path"]))


def local(where: AnyPlace) -> Path:
    """Returns the path of a file or folder; of a URL that of its copy, made once in a process.

    Raises `LocationError` for what cannot be read, `MissingExtraError` without the library.
    """

    def copy(system: Any, path: str, url: str, place: Path) -> None:
        if not _is_folder(url, system, path):
            _copy(system, path, place)
            return
        for name in _listed(system, path):
            _copy(system, f"{path}/{name}", _inside(place, name, url))

    return _copied_once(where, copy)


def local_files(where: AnyPlace, names: Callable[[Path], Iterable[str]], *first: str) -> Path:
    """Returns a folder; of a URL a copy that holds the files `first` and those `names` then tells.

    So a folder is copied from where none can be listed. What does not exist is left out of the copy
    without a word: who reads the folder says what is missing.
    """

    def copy(system: Any, path: str, url: str, place: Path) -> None:
        place.mkdir(exist_ok=True)
        _copy_existing(system, path, first, place, url)
        _copy_existing(system, path, names(place), place, url)

    return _copied_once(where, copy)


def _copied_once(where: AnyPlace, copy: Callable[[Any, str, str, Path], None]) -> Path:
    """Returns a path; of a URL the place to which `copy` brings it at its first use."""
    url = url_of(where)
    if url is None:
        return path_of(where)
    with _LOCK:
        if url not in _COPIES:
            with _reading(url) as (system, path):
                place = _place(url)
                copy(system, path, url, place)
            _COPIES[url] = place
        return _COPIES[url]


def beside(where: AnyPlace, names: Iterable[str]) -> None:
    """Copies those of the files beside a URL's that exist to its copy; of a path nothing."""
    url = url_of(where)
    if url is None:
        return
    copy = local(where)
    with _reading(url.rpartition("/")[0]) as (system, path):
        _copy_existing(system, path, names, copy.parent, url)


def holds(where: AnyPlace, name: str) -> bool:
    """Whether a folder, or a URL as one, holds a file of that name."""
    url = url_of(where)
    if url is None:
        return (path_of(where) / name).is_file()
    with _reading(url) as (system, path):
        return bool(system.exists(f"{path}/{name}", **_in_time(system)))


def state_of(where: object) -> str:
    """Returns what tells whether a file, folder or URL has changed; empty for what is none.

    Of files it is the size and the time of the last change; of a URL what its server tells.
    """
    url = url_of(where)
    if url is not None:
        with _reading(url) as (system, path):
            if _is_folder(url, system, path):
                names = _listed(system, path)
            else:
                bundle = system.exists(f"{path}/manifest.json", **_in_time(system))
                names = ["manifest.json"] if bundle else []
            places = [f"{path}/{name}" for name in names] or [path]
            system.invalidate_cache()
            infos = [system.info(url, **_in_time(system)) for url in places]
            # What fsspec calls a key of a file is for HTTP its URL, whatever it holds.
            return " ".join(entry for info in infos for entry in (info["name"], *_version(info)))
    if not isinstance(where, str | Path) or not (place := path_of(where)).exists():
        return ""
    files = (
        sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]
    )
    states = ((str(file), file.stat()) for file in files)
    return " ".join(f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in states)


@contextmanager
def named_by_url() -> Iterator[None]:
    """Within the block, errors name URLs and not their copies."""
    try:
        yield
    except MoexportError as error:
        error.message = in_words(error.message)
        error.hint = None if error.hint is None else in_words(error.hint)
        error.args = (error.message,)
        raise


def in_words(text: str) -> str:
    """Returns a text in which copies are called by their URLs."""
    for url, copy in _COPIES.items():
        text = text.replace(str(copy), url)
    return text


def _place(url: str) -> Path:
    """Where the copy of a URL goes, in a folder of its own: under its own name."""
    if not _FOLDERS:
        _FOLDERS.append(scratch_until_exit("downloads"))
    folder = Path(mkdtemp(dir=_FOLDERS[0]))
    name = posixpath.basename(unquote(urlsplit(url).path)) or urlsplit(url).netloc
    return _inside(folder, name, url)


def _inside(folder: Path, name: str, url: str) -> Path:
    """A file of a folder; `LocationError` for a name that leads elsewhere."""
    parts = name.split("/")
    if not name or {"", ".", ".."} & {*parts} or re.search(r"[\\:\x00]", name):
        raise LocationError(f"{url}: holds a file that cannot be copied by its name {name!r}")
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
        if not target.exists() and system.exists(f"{path}/{name}", **_in_time(system)):
            _copy(system, f"{path}/{name}", target)


def _copy(system: Any, path: str, target: Path) -> None:
    """Copies a file, again where it broke off or was changed meanwhile; leaves no part of one."""
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
    """Copies a file of the size that its server announced, which fits on the disk."""
    from fsspec.callbacks import Callback

    url = system.unstrip_protocol(path)
    before = system.info(path, **_in_time(system))
    length = before.get("size")
    free = max(0, shutil.disk_usage(target.parent).free - ROOM_BYTES)
    if length is not None and length > free:
        raise LocationError(
            f"{url}: has {length} bytes, and {free} are free in {target.parent}", hint=ROOM
        )
    most = min(free, UNTOLD_BYTES) if length is None else length

    started = time.monotonic()

    def arrived(size: int | None, value: int, **_: object) -> None:
        took = time.monotonic() - started
        if "http" in system.protocol and value < SLOWEST * (took - STALLED_S):
            raise LocationError(
                f"{url}: {value} bytes came in {took:.0f} s, fewer than {SLOWEST} a second",
                hint="download it with a program that goes on, and give its path",
            )
        if value > most:
            limit = "its server announced" if length is not None else "are taken of an unknown size"
            raise LocationError(f"{url}: more bytes come than the {most} that {limit}", hint=ROOM)

    limit = _in_time(system, 2 * STALLED_S + most / SLOWEST)
    system.get_file(path, str(target), callback=Callback(hooks={"limit": arrived}), **limit)
    came = target.stat().st_size
    if length is not None and came != length:
        raise EOFError(f"{came} of {length} bytes came")
    system.invalidate_cache(path)
    if _version(system.info(path, **_in_time(system))) != _version(before):
        raise EOFError("it was changed while it was copied")


def _version(info: Mapping[str, Any]) -> list[str]:
    """What a server tells of a file's content: its size, hash and time."""
    return [f"{key} {info[key]}" for key in VERSION if info.get(key) is not None]


def _options(scheme: str) -> dict[str, Any]:
    """What fsspec is told beside a URL: of HTTP time-outs, and that nothing is to be unpacked.

    A small reply that is compressed could unpack to any size.
    """
    if scheme not in ONE_FILE:
        return {}
    import aiohttp
    import fsspec

    users = fsspec.config.conf.get(scheme, {})
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=STALLED_S)
    client = {**users.get("client_kwargs", {}), "timeout": timeout, "auto_decompress": False}
    return {
        "client_kwargs": client,
        "headers": {**users.get("headers", {}), "Accept-Encoding": "identity"},
    }


def _in_time(system: Any, seconds: float | None = None) -> dict[str, Any]:
    """What a call of HTTP is told: how long it may take in all; headers may drip, too."""
    if "http" not in system.protocol:
        return {}
    return {"timeout": 2 * STALLED_S if seconds is None else seconds}


@contextmanager
def _reading(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of a URL and the path in it; what goes wrong names the URL."""
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
            hint=install(extra) if extra else f"fsspec says: {error}",
        ) from error
    except PermissionError as error:
        raise LocationError(f"{url}: may not be read ({error})", hint=CREDENTIALS) from error
    except Exception as error:  # every library has errors of its own
        # To fsspec's HTTP all that fails is a file that does not exist; the cause says more.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
        status = getattr(cause, "status", None)
        if cause is None or status in (404, 410):
            raise LocationError(f"{url}: there is no such file", hint="check the URL") from error
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        if isinstance(cause, TimeoutError):
            reason = f"nothing came for {STALLED_S:.0f} s, or too little in all"
        denied = status in (401, 403) or "redential" in str(cause)
        raise LocationError(
            f"{url}: cannot be read ({reason})", hint=CREDENTIALS if denied else None
        ) from error


CREDENTIALS = "log in as the library of this scheme asks: docs/scale-out.md#urls names them"
