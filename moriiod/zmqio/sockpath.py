"""Where a Unix socket lies in the file system: made safely, never taken from a live process.

    prepare_socket_path(path); socket.bind(path); publish_socket(path, ...); socket.listen()

Nobody can connect before ``listen``, so the permissions are right before the first client.
"""

from __future__ import annotations

import errno
import grp
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Final

from moriiod.errors import AddressInUse, ConfigError

#: ``sun_path`` of the kernel less the closing zero.
MAX_PATH_BYTES: Final = 107
#: Only the daemon's user and group may even look for the sockets.
DIRECTORY_MODE: Final = 0o750


def prepare_socket_path(path: str) -> None:
    """Make sure that a socket can be bound at this path.

    The directory is made where it is missing, and the socket that a dead process left behind is
    removed. Nothing else is ever removed.

    Raises:
        ConfigError: The path is too long, its directory cannot be used, or something lies there
            that is not a socket.
        AddressInUse: A live process listens there.
    """
    n_bytes = len(os.fsencode(path))
    if not 0 < n_bytes <= MAX_PATH_BYTES or "\0" in path:
        raise ConfigError(
            f"a socket path has 1 to {MAX_PATH_BYTES} bytes, this one has {n_bytes}: {path[:200]}",
            path=path[:512],
            n_bytes=n_bytes,
            limit=MAX_PATH_BYTES,
        )
    _prepare_directory(os.path.dirname(path) or ".")
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot look at {path}: {error.strerror}", path=path) from error
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path} exists and is not a socket; it is left alone", path=path)
    _refuse_if_live(path, path)
    _remove_dead(path)


def publish_socket(path: str, mode: int, group: str | None) -> None:
    """Give a bound socket its owner and permissions; call it before ``listen``.

    Args:
        path: Of the socket.
        mode: Permission bits, for example 0o660.
        group: Name of the group it belongs to; None leaves the group of this process.

    Raises:
        ConfigError: The group does not exist, or this process may not use it.
    """
    try:
        if group is not None:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
        os.chmod(path, mode)
    except KeyError:
        raise ConfigError(f"there is no group {group!r}", group=group, path=path) from None
    except OSError as error:
        raise ConfigError(
            f"cannot set mode {mode:o} and group {group} of {path}: {error.strerror}",
            path=path,
            group=group,
        ) from error


def remove_socket(path: str) -> None:
    """Remove a socket of ours; what is not a socket, or not there, is left alone."""
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        return


def _prepare_directory(directory: str) -> None:
    path = Path(directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise ConfigError(f"{directory} is not a directory", path=directory) from None
    except OSError as error:
        raise ConfigError(
            f"cannot make the directory {directory}: {error.strerror}", path=directory
        ) from error
    else:
        # Whatever the umask took away. What is not permission bits, such as an inherited group
        # bit, stays.
        special = stat.S_IMODE(path.stat().st_mode) & ~0o777
        path.chmod(special | DIRECTORY_MODE)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"no permission to create a socket in {directory}", path=directory)


def _remove_dead(path: str) -> None:
    """Remove a dead socket, unless someone replaced it by a live one just now.

    Two daemons that start together may both have found the old socket dead. So it is moved aside
    first, which only one of them can do, and looked at again under a name that nobody else knows.
    """
    directory = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    aside = f".{secrets.token_hex(8)}"
    try:
        os.rename(path, aside, dst_dir_fd=directory)
        try:
            # By way of the descriptor, because the whole path may be too long for a socket.
            _refuse_if_live(f"/proc/self/fd/{directory}/{aside}", path)
        except AddressInUse:
            # A link, because a rename would replace what a third daemon has bound meanwhile.
            os.link(aside, path, src_dir_fd=directory)
            raise
        finally:
            os.unlink(aside, dir_fd=directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot replace {path}: {error.strerror}", path=path) from error
    finally:
        os.close(directory)


def _refuse_if_live(address: str, path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        error = probe.connect_ex(address)
    # A listener of another socket type, or one with a full backlog, is alive as well. No
    # permission to connect tells nothing, so it counts as alive too.
    if error not in (errno.ECONNREFUSED, errno.ENOENT):
        raise AddressInUse(
            f"another process listens at {path}", path=path, reason=errno.errorcode.get(error, "")
        )
