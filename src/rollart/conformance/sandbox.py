"""Conformance of sandboxes. Commands use /bin/sh and coreutils alone, so that any root file system serves.

An implementation behind somebody else's service cannot promise everything: what it does not declare in `features` does
not apply.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from rollart.conformance.case import Case, ConformanceError, NotApplicable, Suite, check
from rollart.ports.sandbox import Sandbox, Sandboxes
from rollart.types.errors import SandboxFault, SandboxFileError, SandboxLost
from rollart.types.sandboxes import ExecResult, Limits, SandboxSpec

SUITE = Suite["SandboxHarness", None]()


class Feature(Enum):
    LIMITS = auto()
    """Memory, processes, disk and size of files are limited."""
    EXACT_OUTPUT = auto()
    """Output may be any bytes, its two streams are apart, and it is bounded."""
    SIGNALS = auto()
    """A signal that ended a command is reported as one."""
    SNAPSHOTS = auto()
    BACKGROUND = auto()
    """What a command leaves running is killed, or kept if that is asked for."""
    CLEAN_RESET = auto()
    """Everything that was written is gone after a reset, not only in the working directory."""
    SEPARATE = auto()
    """Two sandboxes see nothing of each other."""


ALL_FEATURES = frozenset(Feature)
SPEC = SandboxSpec(
    limits=Limits(
        time_s=60.0, memory_mb=128, processes=32, open_files=64, file_mb=8, disk_mb=16, files=500, output_kb=16
    )
)


@dataclass(kw_only=True)
class SandboxHarness:
    """A source of sandboxes, and what the suite cannot know about it."""

    sandboxes: Sandboxes
    scratch: Path
    """Empty folder of this machine."""
    features: frozenset[Feature] = ALL_FEATURES
    kill: Callable[[Sandbox], None] | None = None
    """Kill a sandbox from outside, as the machine's administrator would."""
    spec: SandboxSpec = field(default=SPEC)

    def need(self, *features: Feature) -> None:
        if not self.features >= set(features):
            raise NotApplicable(f"{', '.join(feature.name for feature in features)} is not declared")

    @contextmanager
    def sandbox(self) -> Iterator[Sandbox]:
        made = self.sandboxes.create(self.spec)
        try:
            yield made
        finally:
            made.close()


def sh(sandbox: Sandbox, script: str, **options: object) -> ExecResult:
    return sandbox.exec(["sh", "-c", script], **options)  # type: ignore[arg-type]


# --- commands -------------------------------------------------------------------------------------------------------


@SUITE.case
def a_command_has_a_result(harness: SandboxHarness) -> None:
    """Output, exit code and arguments are exact; no shell touches them."""
    with harness.sandbox() as sandbox:
        result = sandbox.exec(["printf", "%s|", "a b", "$HOME", "*", ""])
        check(result.stdout == b"a b|$HOME|*||", f"arguments arrive as they are, not as {result.stdout!r}")
        check(result.ok and result.exceeded == (), f"a command without fault is ok: {result}")
        result = sh(sandbox, "echo out; echo err >&2; exit 7")
        check(result.exit_code == 7, f"the exit code is 7, not {result.exit_code}")
        check((result.stdout, result.stderr) == (b"out\n", b"err\n"), f"the streams are apart: {result}")


@SUITE.case
def a_missing_program_is_a_result(harness: SandboxHarness) -> None:
    """A program that does not exist, or is not executable, ends with 127 or 126, as in a shell."""
    with harness.sandbox() as sandbox:
        result = sandbox.exec(["no-such-program"])
        check(result.exit_code == 127, f"a missing program ends with 127, not {result}")
        sandbox.write_file("plain.txt", b"text")
        result = sandbox.exec(["./plain.txt"])
        check(result.exit_code == 126, f"a file that is no program ends with 126, not {result}")


@SUITE.case
def input_and_environment_are_given(harness: SandboxHarness) -> None:
    """Standard input, environment and working directory are those of the call; relative paths start at the workdir."""
    with harness.sandbox() as sandbox:
        check(sandbox.exec(["cat"], stdin=b"in").stdout == b"in", "standard input is what was given")
        check(sandbox.exec(["cat"]).stdout == b"", "standard input is empty by default")
        check(sh(sandbox, "echo $COLOUR", env={"COLOUR": "red"}).stdout == b"red\n", "the environment is added to")
        check(sandbox.exec(["pwd"]).stdout.decode().strip() == harness.spec.workdir, "commands start in the workdir")
        sandbox.exec(["mkdir", "-p", "inner"])
        found = sandbox.exec(["pwd"], cwd="inner").stdout.decode().strip()
        check(found == f"{harness.spec.workdir}/inner", f"cwd is relative to the workdir, but it is {found}")


@SUITE.case
def secrets_are_not_inherited(harness: SandboxHarness) -> None:
    """The environment has what the spec and the call give, and a few public defaults."""
    harness.need(Feature.SEPARATE)
    with harness.sandbox() as sandbox:
        names = {line.partition("=")[0] for line in sandbox.exec(["env"]).stdout.decode().splitlines()}
        check(names <= {"PATH", "HOME", "USER", "LANG", "TMPDIR", "PWD"}, f"unexpected variables: {sorted(names)}")


@SUITE.case
def a_command_over_its_time_is_a_result(harness: SandboxHarness) -> None:
    """It is killed with all its children, says so, and the sandbox goes on."""
    with harness.sandbox() as sandbox:
        result = sh(sandbox, "sleep 1000 & sleep 1000", time_s=0.5)
        check(result.timed_out and "time" in result.exceeded, f"the limit of time is reported: {result}")
        check(not result.ok, "a command that was killed is not ok")
        check(sandbox.exec(["true"]).ok, "the next command works")


@SUITE.case
def a_signal_is_a_result(harness: SandboxHarness) -> None:
    """A command that kills itself, or everything it can, has that as its result; it cannot end its sandbox."""
    harness.need(Feature.SIGNALS)
    with harness.sandbox() as sandbox:
        result = sh(sandbox, "kill -9 $$")
        check((result.exit_code, result.signal) == (None, 9), f"the signal is 9: {result}")
        check(not result.timed_out and not result.memory_exceeded, f"nothing else is claimed: {result}")
        sh(sandbox, "kill -9 1; kill -9 -1")
        check(sandbox.exec(["true"]).ok, "the sandbox survives whatever a command kills")


@SUITE.case
def output_is_bounded(harness: SandboxHarness) -> None:
    """Half of the limit is kept from each end, the number of dropped bytes is reported; the command goes on."""
    harness.need(Feature.EXACT_OUTPUT)
    limit = harness.spec.limits.output_kb * 1024
    with harness.sandbox() as sandbox:
        result = sh(sandbox, "echo begin; head -c 20000000 /dev/zero; echo end")
        check(result.ok, f"the command is not stopped: {result.exit_code}")
        check(result.stdout.startswith(b"begin\n") and result.stdout.endswith(b"\0end\n"), "both ends are kept")
        check(len(result.stdout) < limit + 100, f"{len(result.stdout)} bytes are kept of at most {limit}")
        check(result.stdout_dropped == 20000010 - limit, f"{result.stdout_dropped} dropped bytes are reported")
        check("output" in result.exceeded, "the limit of output is reported")
        result = sh(sandbox, r"printf '\377\000\r\n'")
        check(result.stdout == b"\xff\0\r\n", f"any bytes are output: {result.stdout!r}")


@SUITE.case
def output_is_streamed(harness: SandboxHarness) -> None:
    """A callback sees output while the command runs."""
    harness.need(Feature.EXACT_OUTPUT)
    with harness.sandbox() as sandbox:
        seen: list[tuple[str, bytes]] = []
        early: list[bytes] = []

        def on_output(stream: str, data: bytes) -> None:
            seen.append((stream, data))
            early.append(data)

        sh(sandbox, "echo one; echo two >&2", on_output=on_output)
        streams = {name: b"".join(data for stream, data in seen if stream == name) for name in ("stdout", "stderr")}
        check(streams == {"stdout": b"one\n", "stderr": b"two\n"}, f"both streams are passed on: {seen}")


# --- limits ---------------------------------------------------------------------------------------------------------


@SUITE.case
def memory_is_limited(harness: SandboxHarness) -> None:
    """A command that takes too much is killed or refused memory; the next one has all of it again."""
    harness.need(Feature.LIMITS)
    with harness.sandbox() as sandbox:
        # `tail` keeps what has no line end in memory.
        result = sandbox.exec(["sh", "-c", "head -c 400000000 /dev/zero | tail"])
        check(result.memory_exceeded or b"memory" in result.stderr, f"the limit of memory acts: {result}")
        check(not result.timed_out, f"it is no limit of time: {result}")
        check(sandbox.exec(["true"]).exceeded == (), "the next command is not blamed for it")


@SUITE.case
def processes_are_limited(harness: SandboxHarness) -> None:
    """A fork bomb stays below the limit, and is gone afterwards."""
    harness.need(Feature.LIMITS)
    with harness.sandbox() as sandbox:
        result = sh(sandbox, "for i in $(seq 200); do sleep 1000 & done; wait", time_s=60)
        check(result.processes_exceeded or b"ork" in result.stderr, f"not all processes could start: {result}")
        result = sh(sandbox, "for i in 1 2 3 4 5 6 7 8; do sleep 0.01 & done; wait")
        check(result.ok and result.stderr == b"", f"the next command can start processes: {result}")


@SUITE.case
def disk_is_limited(harness: SandboxHarness) -> None:
    """Bytes, number of files and size of one file have limits; a reset frees them."""
    harness.need(Feature.LIMITS, Feature.CLEAN_RESET)
    with harness.sandbox() as sandbox:
        result = sh(sandbox, "for i in 1 2 3 4 5; do head -c 7000000 /dev/zero > big$i || exit 3; done")
        check(result.exit_code == 3 and result.disk_full, f"the disk is full: {result}")
        sandbox.reset()
        result = sh(sandbox, "i=0; while [ $i -lt 2000 ]; do : > f$i || exit 3; i=$((i+1)); done")
        check(not result.ok and result.disk_full, f"there are too many files: {result}")
        sandbox.reset()
        result = sh(sandbox, "head -c 9000000 /dev/zero > large")
        check(not result.ok and not result.disk_full, f"one file is limited to 8 MB: {result}")
        with raises(SandboxFileError, "a file that does not fit is refused"):
            sandbox.write_file("huge", bytes(17 * 2**20))


# --- background -----------------------------------------------------------------------------------------------------


@SUITE.case
def background_ends_with_its_command(harness: SandboxHarness) -> None:
    """What a command leaves running is killed, even as a daemon of its own session."""
    harness.need(Feature.BACKGROUND)
    with harness.sandbox() as sandbox:
        sh(sandbox, "(setsid sh -c 'while :; do echo x >> beat; sleep 0.01; done' > /dev/null 2>&1 &)")
        first = sh(sandbox, "wc -c < beat || echo 0").stdout
        second = sh(sandbox, "sleep 0.1; wc -c < beat || echo 0").stdout
        check(first == second, "nothing runs any more")


@SUITE.case
def background_can_be_kept(harness: SandboxHarness) -> None:
    """With `keep_background` a server runs on, until a command without it ends."""
    harness.need(Feature.BACKGROUND)
    with harness.sandbox() as sandbox:
        sh(sandbox, "mkfifo pipe; (echo kept > pipe &)", keep_background=True)
        result = sandbox.exec(["cat", "pipe"], keep_background=True, time_s=120)
        check(result.stdout == b"kept\n", f"the process in the background still writes: {result}")


# --- files ----------------------------------------------------------------------------------------------------------


@SUITE.case
def files_come_back_as_they_went(harness: SandboxHarness) -> None:
    """Any bytes, in new folders; executable if asked for."""
    content = bytes(range(256)) * 1000 + b"\r\n"
    with harness.sandbox() as sandbox:
        sandbox.write_file("a/b/file.bin", content)
        check(sandbox.read_file("a/b/file.bin") == content, "the file is as it was written")
        check(sandbox.read_file(f"{harness.spec.workdir}/a/b/file.bin") == content, "absolute paths work too")
        sandbox.write_file("a/b/file.bin", b"short")
        check(sandbox.read_file("a/b/file.bin") == b"short", "a file is replaced as a whole")
        sandbox.write_file("run.sh", b"#!/bin/sh\necho ran\n", executable=True)
        check(sandbox.exec(["./run.sh"]).stdout == b"ran\n", "an executable file runs")


@SUITE.case
def a_wrong_path_is_no_failure(harness: SandboxHarness) -> None:
    """Missing and too large files, folders and devices raise `SandboxFileError`, at once, and the sandbox goes on."""
    with harness.sandbox() as sandbox:
        sandbox.write_file("file", bytes(1000))
        sh(sandbox, "mkdir folder; mkfifo fifo; ln -s loop loop")
        for path in ("missing", "folder", "fifo", "loop", "/dev/zero"):
            with raises(SandboxFileError, f"{path} cannot be read"):
                sandbox.read_file(path)
        with raises(SandboxFileError, "a file that is too large is refused"):
            sandbox.read_file("file", max_bytes=999)
        check(len(sandbox.read_file("file", max_bytes=1000)) == 1000, "a file at the limit is read")
        with raises(SandboxFileError, "a folder is not written to"):
            sandbox.write_file("folder", b"")
        check(sandbox.exec(["true"]).ok, "the sandbox goes on")


@SUITE.case
def folders_travel(harness: SandboxHarness) -> None:
    """A folder is uploaded and downloaded with its structure; links do not travel out."""
    source = harness.scratch / "source"
    (source / "inner").mkdir(parents=True)
    (source / "inner" / "file").write_bytes(b"deep")
    (source / "tool.sh").write_bytes(b"#!/bin/sh\necho tool\n")
    (source / "tool.sh").chmod(0o755)
    (source / "empty").mkdir()
    with harness.sandbox() as sandbox:
        sandbox.upload(source, "up")
        check(sandbox.read_file("up/inner/file") == b"deep", "files are uploaded with their folders")
        check(sandbox.exec(["up/tool.sh"]).stdout == b"tool\n", "an executable file stays one")
        sh(sandbox, "ln -s /etc/passwd up/link; ln -s / up/root; echo new > up/new")
        target = harness.scratch / "target"
        sandbox.download("up", target)
        found = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
        check(found == ["empty", "inner", "inner/file", "new", "tool.sh"], f"regular files come back: {found}")
        check((target / "new").read_bytes() == b"new\n", "with their contents")
        for options in ({"max_files": 3}, {"max_bytes": 10}):
            with raises(SandboxFileError, f"more than {options} is refused"):
                sandbox.download("up", harness.scratch / "more", **options)
            check(not (harness.scratch / "more").exists(), "a refused download leaves nothing")
        with raises(SandboxFileError, "a missing folder is refused"):
            sandbox.download("missing", harness.scratch / "none")
        check({path.name for path in harness.scratch.iterdir()} == {"source", "target"}, "no drafts are left")


@SUITE.case
def deep_folders_do_not_travel(harness: SandboxHarness) -> None:
    """Folders nested so deeply that copying or removing them would fail are refused, and the sandbox goes on."""
    with harness.sandbox() as sandbox:
        made = sandbox.exec(["mkdir", "-p", "d/" * 300])
        check(made.ok, f"folders can be nested: {made}")
        with raises(SandboxFileError, "a download of deep folders is refused"):
            sandbox.download(".", harness.scratch / "deep")
        check(list(harness.scratch.iterdir()) == [], "a refused download leaves nothing")
        if Feature.SNAPSHOTS in harness.features:
            with raises(SandboxFileError, "a snapshot of deep folders is refused"):
                sandbox.snapshot()
        check(sandbox.exec(["true"]).ok, "the sandbox goes on")


# --- life -----------------------------------------------------------------------------------------------------------


@SUITE.case
def a_reset_starts_clean(harness: SandboxHarness) -> None:
    """Nothing that ran before is left in the working directory."""
    with harness.sandbox() as sandbox:
        sandbox.write_file("trace", b"")
        sandbox.reset()
        check(sandbox.exec(["ls", "-A"]).stdout == b"", "the working directory is empty")


@SUITE.case
def a_reset_leaves_nothing_anywhere(harness: SandboxHarness) -> None:
    """Files outside of the working directory, shared memory and processes are gone too."""
    harness.need(Feature.CLEAN_RESET)
    with harness.sandbox() as sandbox:
        sh(sandbox, "touch /tmp/trace /dev/shm/trace ~/trace /var/tmp/trace; (sleep 1000 &)", keep_background=True)
        sandbox.reset()
        result = sh(sandbox, "ls -A /tmp /dev/shm ~ /var/tmp | grep trace; ls /proc | grep -c '^[0-9]'")
        lines = result.stdout.split()
        check(b"trace" not in lines, f"files are left: {result.stdout!r}")
        check(int(lines[-1]) <= 6, f"processes are left: {result.stdout!r}")


@SUITE.case
def snapshots_are_kept(harness: SandboxHarness) -> None:
    """A reset or a new sandbox starts from a snapshot, with its deletions, and does not change it."""
    harness.need(Feature.SNAPSHOTS)
    with harness.sandbox() as sandbox:
        sh(sandbox, "mkdir d; echo one > d/kept; echo two > d/removed; ln -s kept d/link; echo 3 > plain")
        first = sandbox.snapshot()
        sh(sandbox, "rm d/removed; echo changed > d/kept; rm -r plain; mkdir plain; touch plain/inner")
        second = sandbox.snapshot()
        sandbox.reset(first)
        check(sh(sandbox, "cat d/*").stdout == b"one\none\ntwo\n", "the first snapshot is as it was kept")
        sh(sandbox, "echo damage > d/kept")
        sandbox.reset(second)
        check(sh(sandbox, "ls d plain").stdout == b"d:\nkept\nlink\n\nplain:\ninner\n", "deletions are kept too")
        check(sandbox.read_file("d/link") == b"changed\n", "links are kept")
        sh(sandbox, "echo third > d/third; rm d/kept")
        third = sandbox.snapshot()
        for name in (first, second):
            harness.sandboxes.forget(name)
        harness.sandboxes.forget("unknown")
        other = harness.sandboxes.create(harness.spec, snapshot=third)
        try:
            check(sh(other, "ls d").stdout == b"link\nthird\n", "a snapshot outlives those below it")
            harness.sandboxes.forget(third)
            found = sh(other, "cat d/third; ls plain").stdout
            check(found == b"third\ninner\n", f"a sandbox outlives the snapshot that it was made from: {found!r}")
        finally:
            other.close()
        with raises(SandboxFault, "a forgotten snapshot is not there"):
            sandbox.reset(first)


@SUITE.case
def sandboxes_are_apart(harness: SandboxHarness) -> None:
    """Two sandboxes at once share no files and no processes."""
    harness.need(Feature.SEPARATE)
    with harness.sandbox() as one, harness.sandbox() as two:
        check(one.name != two.name, "they have names of their own")
        sh(one, "echo secret > /tmp/secret; echo secret > secret; (sleep 4321 &)", keep_background=True)
        result = sh(two, "cat /tmp/secret secret; grep -l 4321 /proc/[0-9]*/cmdline | grep -v self")
        check(b"secret" not in result.stdout, f"files of the other are seen: {result}")


@SUITE.case
def closing_interrupts_and_is_final(harness: SandboxHarness) -> None:
    """`close` ends a command that runs in another thread with `SandboxLost`, and can be repeated."""
    harness.need(Feature.SIGNALS)
    sandbox = harness.sandboxes.create(harness.spec)
    started = threading.Event()
    ends: list[ExecResult | SandboxLost] = []

    def run() -> None:
        try:
            ends.append(sh(sandbox, "echo started; sleep 1000", on_output=lambda *_: started.set(), time_s=300))
        except SandboxLost as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    check(started.wait(60), "the command runs")
    sandbox.close()
    thread.join(60)
    check(len(ends) == 1 and isinstance(ends[0], SandboxLost), f"the call ends with SandboxLost, not {ends}")
    sandbox.close()
    with raises(SandboxLost, "a closed sandbox runs nothing"):
        sandbox.exec(["true"])


@SUITE.case
def a_killed_sandbox_is_lost(harness: SandboxHarness) -> None:
    """Death from outside is a failure and never a result: while a command runs, and before one. A reset revives it."""
    if harness.kill is None:
        raise NotApplicable("nothing kills it from outside")
    with harness.sandbox() as sandbox:
        harness.kill(sandbox)
        with raises(SandboxLost, "a command in a killed sandbox fails"):
            sandbox.exec(["true"])
        sandbox.reset()
        check(sandbox.exec(["true"]).ok, "a reset replaces it")
        started = threading.Event()
        killer = threading.Thread(target=lambda: (started.wait(60), harness.kill(sandbox)))  # type: ignore[misc]
        killer.start()
        with raises(SandboxLost, "a command whose sandbox is killed fails"):
            sh(sandbox, "echo started; sleep 1000", on_output=lambda *_: started.set(), time_s=300)
        killer.join()
        with suppress(SandboxFault):
            sandbox.read_file("anything")
        sandbox.reset()
        check(sandbox.exec(["true"]).ok, "a reset replaces it again")


@contextmanager
def raises(kind: type[Exception], promise: str) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise ConformanceError(f"{promise}: {kind.__name__} was not raised")


CASES: tuple[Case[SandboxHarness, None], ...] = SUITE.cases()
