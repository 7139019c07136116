"""A process that has torch and transformers loaded, and forks one child for each job.

Importing them takes seconds, a fork takes hundredths. The server never touches the device, so that each child can;
where a library does when it is imported, the child becomes a fresh process and imports all anew.
Jobs have no use for tokens and passwords, so their environment holds none: no log and no model's own code tells one.
It is the parent's child and dies with it: it sees its socket close, and asks the kernel for SIGTERM when the parent
goes (PR_SET_PDEATHSIG); each job's process is in a session of its own, asks for SIGKILL when the server goes, and is
killed as a group. Both are needed: the signal alone is lost where the server has not asked yet, the socket alone
where a child has inherited it.

A snapshot is a child that has run a job of its own up to some point and forks one child there for each further job, as
the server does: what the job has made until then need not be made again. It lives until it is closed.

:mod:`.server`, :mod:`.snapshot` and :mod:`.link` are the parent's side; the process itself is :mod:`.process`, and
:mod:`.begun` starts it. Messages are lines of JSON:
``{"load": MODULES}``, ``{"run": FOLDER, "early": BOOL}`` and ``{"kill": SIGNAL}`` to the server, ``{"ready":
SECONDS}``, ``{"pid": PID}`` and ``{"exit": STATUS}`` back; ``{"snapshot": FOLDER}`` with a socket, by which a snapshot
is told the same, and says ``{"snapshot": PID}`` first, and ``{"refused": WORDS}`` where it can't be forked.
"""
