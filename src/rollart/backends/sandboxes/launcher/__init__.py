"""Process that creates sandboxes and runs commands in them, for a worker that has threads and secrets.

    worker process ── request, file descriptors ──► launcher ── fork ──► supervisor of one sandbox
        │                                                                   │  bwrap → keeper, pid 1 of the sandbox
        └──────────── control socket of that sandbox ──────────────────────┤
                                                                            └─ fork ──► joiner → command

Only the standard library is used here, and the process starts with an empty environment. Its mount namespace is its
own: mounts of sandboxes are in no other, and are gone when the last process in it is. Every process dies with, or
cleans up after, the one above it:

- the worker dies: the control sockets close, each supervisor removes its sandbox;
- the launcher dies: the kernel tells the supervisors by signal, they remove their sandboxes;
- a supervisor dies: the kernel kills its keeper and thereby the sandbox; the launcher removes the rest;
- all of them die at once: what is left are folders and cgroups, which the next launcher removes (`leftovers.py`).

The keeper is the init process of the sandbox's PID namespace: nothing inside can kill it, and the kernel kills
everything inside when it dies. It is in none of the cgroups that limit commands, so no code of the agent may run as it
(`init_program.py`).
"""
