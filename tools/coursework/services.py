"""What other services need to grade: an archive for Gradescope, a workflow for GitHub Classroom.

Gradescope unpacks the archive to /autograder/source, runs setup.sh once, and run_autograder for each
submission, which is in /autograder/submission, in a container of its own. A workflow runs in the student's
own repository: what it says is for the student. Marks come from `grade-class`.
"""

import os
import platform
import zipfile

from coursework import CourseworkError, SOLUTIONS

WORKFLOW = ".github/workflows/classroom.yml"
OURS = (".github/workflows/ci.yml", ".github/workflows/pages.yml")  # they would run in a student's repository, and fail
INSIDE = "lockstep"  # the folder of the archive with the repository
SET_UP = f"""#!/usr/bin/env bash
# Gradescope runs this once, when it makes the image of the autograder.
set -euo pipefail
cd /autograder/source/{INSIDE}
apt-get update
apt-get install -y --no-install-recommends python3 ca-certificates
./lockstep grade --prepare
"""
RUN = f"""#!/usr/bin/env bash
# Gradescope runs this for each submission, in a container of its own. Where that one may not make a
# sandbox, it is the only one, and the result says so.
set -uo pipefail
cd /autograder/source/{INSIDE}
./lockstep grade /autograder/submission --gradescope /autograder/results/results.json
[ -f /autograder/results/results.json ]  # also if not all tasks passed, or nothing was submitted that can be graded
"""


def workflow():
    """Grades at every push, and shows the points of each task, on a system like this: solutions fit no other."""
    system = platform.freedesktop_os_release() if os.path.exists("/etc/os-release") else {}
    known = system.get("ID") in ("debian", "ubuntu") and system.get("VERSION_CODENAME")
    container = f"{system['ID']}:{system['VERSION_CODENAME']}" if known else "debian:trixie"
    return f"""# GitHub Classroom: shows at every push what ./lockstep grade says. The marks are the teacher's.
name: classroom
on: [push, workflow_dispatch]
permissions:
  contents: read
jobs:
  grade:
    runs-on: ubuntu-latest
    container: {container}
    timeout-minutes: 90
    steps:
      - run: apt-get update && apt-get install -y --no-install-recommends ca-certificates git
      - uses: actions/checkout@v4
      - run: ./lockstep grade --json verdicts.json | tee verdicts.txt
      - if: always()
        run: |
          {{ echo '```'; cat verdicts.txt; echo '```'; }} >> "$GITHUB_STEP_SUMMARY"
"""


def write_gradescope(root, target, files, say):
    """Writes the archive with all that a teacher's repository has."""
    if (root / SOLUTIONS).exists():
        raise CourseworkError(f"{root} is a student's tree: make the archive from the solved one")
    if target.suffix != ".zip" or os.path.lexists(target):
        raise CourseworkError(f"{target}: expected the name of a new archive, like gradescope.zip")
    if not target.parent.is_dir():
        raise CourseworkError(f"there is no folder {target.parent}")
    beside = target.with_name(f".{os.getpid()}.zip")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in (("setup.sh", SET_UP), ("run_autograder", RUN)):
                add(archive, name, text.encode(), 0o755)
            for path in files:
                add(archive, f"{INSIDE}/{path}", (root / path).read_bytes(), (root / path).stat().st_mode & 0o777)
        beside.rename(target)
    finally:
        beside.unlink(missing_ok=True)
    say(f"{target}: an autograder for Gradescope, of {len(files)} files; it has the solutions: give it to nobody else")


def add(archive, name, content, mode):
    member = zipfile.ZipInfo(name, date_time=(2026, 1, 1, 0, 0, 0))
    member.external_attr = (0o100000 | mode) << 16
    member.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(member, content)
