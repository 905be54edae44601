"""What all tools do alike: errors of one line, texts that no terminal obeys, an end that leaves
nothing behind.

Names in texts come from files, command lines and other programs. `common/core/text.h` does the same
for the programs in C++.
"""

import argparse
import os
import re
import sys

from child_processes import end_by_exception

# Control characters but for tab and newline, marks that turn the direction of writing or end a line,
# and bytes that are not UTF-8, which Python keeps as surrogates.
MISLEADING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def as_numbers(character):
    byte = ord(character) - 0xDC00
    encoded = bytes([byte]) if 0x80 <= byte <= 0xFF else character.encode(errors="surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in encoded)


def printable(text):
    """The text with the bytes of such characters as numbers: "\\x1b[2J"."""
    return MISLEADING.sub(lambda found: as_numbers(found[0]), text)


def one_line(text):
    """The same on one line: newlines become spaces."""
    return printable(str(text)).replace("\n", " ")


class Printable:
    """A stream on which every text is printable; `raw` is the one below it."""

    def __init__(self, raw):
        self.raw = raw

    def write(self, text):
        return self.raw.write(printable(text))

    def __getattr__(self, name):
        return getattr(self.raw, name)


class Parser(argparse.ArgumentParser):
    """Options by their whole names. Errors in one line, without the usage."""

    refused = 1  # the exit status

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message):
        self.exit(self.refused, f"{self.prog}: {one_line(message)}; --help lists all options\n")


def complain(who, error):
    print(f"{who}: {one_line(error)}", file=sys.stderr, flush=True)


def run_command(main):
    """Ends this process with main's status; a signal unwinds it first, so that nothing is left."""
    end_by_exception()
    sys.stdout, sys.stderr = Printable(sys.stdout), Printable(sys.stderr)
    try:
        sys.exit(main(sys.argv[1:]))
    except RuntimeError as error:  # of Path.resolve(), before Python 3.13, for links in a circle
        if not str(error).startswith("Symlink loop"):
            raise
        complain(os.path.basename(sys.argv[0]).removesuffix(".py"), f"{error}: name another path")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
