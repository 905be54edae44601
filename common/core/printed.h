#pragma once
// Text for people: all that a program writes to stdout and stderr goes through here.
//
// Names in it come from files, command lines and other processes. What a terminal would take for an
// order, or a reader for another text than the one that is there, is shown as \x1b.

#include <fmt/core.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

/// `text` in which each byte of a control character (but for tab and newline), of a mark that turns
/// the direction of writing or ends a line, or of nothing that is UTF-8, is its number: "\x1b[2J".
std::string printable(std::string_view text);
/// The same on one line: newlines become spaces.
std::string on_one_line(std::string_view text);

/// Writes to stdout, as fmt::print() does, what printable() makes of the text.
template <class... Args>
void print_clean(fmt::format_string<Args...> format, Args&&... args) {
  fmt::print("{}", printable(fmt::format(format, std::forward<Args>(args)...)));
}

/// Writes "warning: " and the text to stderr, on one line.
void warn(std::string_view text);

}  // namespace lockstep
