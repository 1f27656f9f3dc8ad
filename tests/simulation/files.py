"""A simulated disk: a crash of the host leaves what was synced in files and directories, and any part of the rest.

A write that was not synced is lost, kept, or torn: any of its pages may be there, and zeros in place of the others.
Changes of a directory that was not synced are lost in any order; a rename is one change. A sync that has failed may
have dropped what it was to write, for good, though it can still be read until the crash.
"""

import errno
import io
import os
import random
import stat
from types import SimpleNamespace

PAGE = 16
"""Bytes of a page: few, so that small files have many."""


class File:
    """What is in a file, and what of it has reached the disk."""

    def __init__(self, content=b""):
        self.content = content
        self.synced = content
        # (offset, bytes), or (size, None) where it was cut; since the last sync
        self.pending = []
        self.holder = None  # who has locked it

    def write(self, offset, chunk):
        self.pending.append((offset, chunk))
        self.content = overlaid(self.content, offset, chunk)

    def cut(self, size):
        self.pending.append((size, None))
        self.content = self.content[:size]

    def sync(self, *, drops=False):
        if not drops:
            self.synced = applied(self.synced, self.pending)
        self.pending = []

    def after_crash(self, rng, known):
        if self not in known:
            kept = [
                part
                for change in self.pending
                if rng.random() < rng.odds
                for part in torn(rng, *change)
            ]
            content = applied(self.synced, kept)
            if len(content) < len(self.content) and rng.random() < rng.odds / 2:
                # its size was written, and not what is in it
                content += bytes(len(self.content) - len(content))
            known[self] = File(content)
        return known[self]


class Folder:
    """The names in a directory, and those of them that have reached the disk."""

    def __init__(self, entries=()):
        self.entries = dict(entries)
        self.synced = dict(entries)
        # tuples of (name, file or folder or None) that are changed at once
        self.pending = []

    def change(self, *changes):
        self.pending.append(changes)
        renamed(self.entries, changes)

    def sync(self, *, drops=False):
        if not drops:  # a journal is not written in part
            for changes in self.pending:
                renamed(self.synced, changes)
            self.pending = []

    def after_crash(self, rng, known):
        if self not in known:
            entries = dict(self.synced)
            for changes in self.pending:
                if rng.random() < rng.odds:
                    renamed(entries, changes)
            known[self] = Folder()
            known[self].entries = {
                name: node.after_crash(rng, known)
                for name, node in entries.items()
            }
            known[self].synced = dict(known[self].entries)
        return known[self]


class Chance(random.Random):
    """Chooses what a crash leaves."""

    odds = 0.5
    tears = True


class Every:
    """Chooses each thing that a crash may leave, one after another; a write is there as a whole, or not."""

    odds = 0.5
    tears = False

    def __init__(self):
        self._choices = []
        self._at = 0

    def random(self):
        if self._at == len(self._choices):
            self._choices.append(0.0)
        self._at += 1
        return self._choices[self._at - 1]

    def turn(self):
        """Go on to the next choices; return whether there are any."""
        while self._choices and self._choices[-1]:
            self._choices.pop()
        if self._choices:
            self._choices[-1] = 1.0
        self._at = 0
        return bool(self._choices)


def signature(node):
    """Return what is in a file or a folder, hashable."""
    if isinstance(node, File):
        return node.content
    return tuple(
        (name, signature(child)) for name, child in sorted(node.entries.items())
    )


def overlaid(content, offset, chunk):
    return (
        content[:offset].ljust(offset, b"\0")
        + chunk
        + content[offset + len(chunk) :]
    )


def applied(content, changes):
    for offset, chunk in changes:
        content = (
            content[:offset]
            if chunk is None
            else overlaid(content, offset, chunk)
        )
    return content


def renamed(entries, changes):
    for name, node in changes:
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def torn(rng, offset, chunk):
    """Yield the pages of a write that have reached the disk."""
    if chunk is None or not rng.tears or rng.random() < 0.5:
        yield offset, chunk
        return
    for begin in range(0, len(chunk), PAGE):
        if rng.random() < rng.odds:
            yield offset + begin, chunk[begin : begin + PAGE]


class Disk:
    """The calls of the operating system, on a simulated disk.

    Args:
        root: What is on it.
        touch: Called before each call with its name and path: it lets others run, and raises what is to go wrong.
    """

    def __init__(self, root, touch):
        self.root = root
        self.touch = touch
        self.descriptors = {}
        self.os = SimpleNamespace(
            O_RDONLY=os.O_RDONLY,
            O_RDWR=os.O_RDWR,
            O_CREAT=os.O_CREAT,
            SEEK_END=os.SEEK_END,
            open=self.open_descriptor,
            close=self.descriptors.pop,
            fsync=self.fsync,
            listdir=self.listdir,
            stat=self.stat,
            makedirs=self.makedirs,
            replace=self.replace,
            remove=self.remove,
            path=SimpleNamespace(dirname=os.path.dirname),
            getpid=lambda: 1,
        )
        self.shutil = SimpleNamespace(rmtree=self.rmtree)

    def find(self, path):
        node = self.root
        for name in filter(None, str(path).split("/")):
            if not isinstance(node, Folder):
                raise NotADirectoryError(
                    errno.ENOTDIR, "Not a directory", str(path)
                )
            if name not in node.entries:
                raise FileNotFoundError(
                    errno.ENOENT, "No such file or directory", str(path)
                )
            node = node.entries[name]
        return node

    def parent(self, path):
        folder, _, name = str(path).rpartition("/")
        node = self.find(folder)
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", folder)
        return node, name

    # The calls

    def open(self, path, mode, buffering=-1):
        if isinstance(path, int):
            return Handle(self, *self.descriptors.pop(path), is_buffered=False)
        self.touch("create" if mode != "rb" else "open", path)
        if mode == "rb":
            return Handle(self, path, self.find(path))
        folder, name = self.parent(path)
        if mode == "xb" and name in folder.entries:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        if name not in folder.entries:
            folder.change((name, File()))
        node = folder.entries[name]
        if node.content:
            node.cut(0)
        return Handle(self, path, node)

    def open_descriptor(self, path, flags, mode=0):
        self.touch("create" if flags & os.O_CREAT else "open", path)
        folder, name = self.parent(path)
        if flags & os.O_CREAT and name not in folder.entries:
            folder.change((name, File()))
        number = max(self.descriptors, default=2) + 1
        self.descriptors[number] = path, self.find(path)
        return number

    def fsync(self, descriptor):
        path, node = self.descriptors[descriptor]
        try:
            is_last = (
                isinstance(node, Folder) and "manifest.json" in node.entries
            )
            self.touch("last fsync" if is_last else "fsync", path)
        except OSError:
            node.sync(drops=True)
            raise
        node.sync()

    def listdir(self, path):
        self.touch("listdir", path)
        node = self.find(path)
        if not isinstance(node, Folder):
            raise NotADirectoryError(
                errno.ENOTDIR, "Not a directory", str(path)
            )
        return list(node.entries)

    def stat(self, path):
        self.touch("stat", path)
        node = self.find(path)
        if isinstance(node, Folder):
            return SimpleNamespace(st_mode=stat.S_IFDIR, st_size=0)
        return SimpleNamespace(st_mode=stat.S_IFREG, st_size=len(node.content))

    def makedirs(self, path, *, exist_ok):
        assert exist_ok
        folder = self.root
        for name in str(path).split("/")[1:]:
            if name not in folder.entries:
                self.touch("mkdir", path)
                if name not in folder.entries:
                    folder.change((name, Folder()))
            folder = folder.entries[name]

    def replace(self, old, new):
        self.touch("replace", new)
        folder, name = self.parent(old)
        other, new_name = self.parent(new)
        assert folder is other
        folder.change((new_name, self.find(old)), (name, None))

    def remove(self, path):
        self.touch("unlink", path)
        self.find(path)
        folder, name = self.parent(path)
        folder.change((name, None))

    def rmtree(self, path):
        for name in sorted(self.listdir(path), reverse=True):
            self.remove(f"{path}/{name}")
        self.touch("rmdir", path)
        folder, name = self.parent(path)
        if self.find(path).entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        folder.change((name, None))


class Handle:
    """A file that is open; a write of one without a buffer may be short."""

    def __init__(self, disk, path, node, *, is_buffered=True):
        self.disk = disk
        self.path = path
        self.node = node
        self.is_buffered = is_buffered
        self.position = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.node.holder is self:
            self.node.holder = None

    def seek(self, offset, whence=0):
        self.position = offset + (
            len(self.node.content) if whence == io.SEEK_END else 0
        )
        return self.position

    def read(self, size=None):
        self.disk.touch("read", self.path)
        end = len(self.node.content) if size is None else self.position + size
        chunk = self.node.content[self.position : end]
        self.position += len(chunk)
        return chunk

    def truncate(self, size):
        self.disk.touch("truncate", self.path)
        self.node.cut(size)

    def write(self, content):
        half = len(content) // 2
        self.disk.touch("write", self.path)
        self.node.write(self.position, content[:half])
        self.position += half
        try:
            self.disk.touch("write", self.path)
        except OSError as error:
            if self.is_buffered or error.errno != errno.ENOSPC:
                raise
            return half
        self.node.write(self.position, content[half:])
        self.position += len(content) - half
        return len(content)
