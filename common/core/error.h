#pragma once
// Errors are for people: one type per kind, one line of text, one exit status.
//
// The text names the thing, the value found, the value expected, and what to do. Libraries throw.
// An error ends the program: options/report.h turns it into a line on stderr and a status. A
// program that trains does not catch it, so that nothing is unwound (training/program.h); the two
// programs of launch/ catch it in main().

#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "common/core/open_task.h"

namespace lockstep {

/// The text of an errno.
inline std::string errno_text(int error) { return std::generic_category().message(error); }

/// Base of everything that Lockstep throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  /// Exit status of a program that ends with this error.
  virtual int exit_status() const { return 1; }
  /// Throws an error of the same kind that says where it happened: "replica 1 on cpu:1: ...".
  [[noreturn]] virtual void throw_within(const std::string& place) const = 0;
};

/// The part that all kinds of errors share.
template <class Kind>
class ErrorOfKind : public Error {
 public:
  using Error::Error;
  [[noreturn]] void throw_within(const std::string& place) const override {
    throw Kind(place + ": " + what());
  }
};

/// The user gave something that cannot be used: an option, a file, a shape. Exit status 1.
class BadInput : public ErrorOfKind<BadInput> {
 public:
  using ErrorOfKind::ErrorOfKind;
};

/// The machine lacks something: a data set, a library, a driver, disk space. Exit status 1.
class EnvironmentError : public ErrorOfKind<EnvironmentError> {
 public:
  using ErrorOfKind::ErrorOfKind;
};

/// Training left the finite numbers: the loss or a gradient is NaN or infinite. Exit status 1.
class NonFinite : public ErrorOfKind<NonFinite> {
 public:
  using ErrorOfKind::ErrorOfKind;
};

/// A device failed while it worked. Exit status 2.
class DeviceError : public ErrorOfKind<DeviceError> {
 public:
  using ErrorOfKind::ErrorOfKind;
  int exit_status() const override { return 2; }
};

/// Another rank died, hung or left. Exit status 2.
class PeerLost : public ErrorOfKind<PeerLost> {
 public:
  using ErrorOfKind::ErrorOfKind;
  int exit_status() const override { return 2; }
};

/// Another rank reports the error: this rank ends with the same status and prints nothing.
class SaidByAnother : public Error {
 public:
  SaidByAnother(const std::string& text, int status) : Error(text), status_(status) {}
  int exit_status() const override { return status_; }
  [[noreturn]] void throw_within(const std::string&) const override { throw *this; }

 private:
  int status_;
};

/// A task of the coursework that nobody has written yet (docs/coursework.md). Exit status 1.
class OpenTask : public ErrorOfKind<OpenTask> {
 public:
  using ErrorOfKind::ErrorOfKind;
};

/// Calls work(). If that throws an Error, `place` is put in front of its text and its kind is kept;
/// any other exception becomes an EnvironmentError.
template <class Work>
void within(const std::string& place, Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    error.throw_within(place);
  } catch (const std::exception& error) {
    throw EnvironmentError(place + ": " + error.what());
  } catch (...) {
    throw EnvironmentError(place + ": an exception that is no std::exception");
  }
}

/// Throws `E` with a formatted message: `fail<BadInput>("--lr: {} is not positive", lr)`.
template <class E, class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw E(fmt::format(format, std::forward<Args>(args)...));
}

/// A check that stays in release builds: throws BadInput with a formatted message unless `ok`.
template <class... Args>
void require(bool ok, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok) throw BadInput(fmt::format(format, std::forward<Args>(args)...));
}

/// Same, for two values that must agree; shows both: "conv1: input channels: found 3, expected 1".
template <class A, class B>
void require_equal(const A& found, const B& expected, const std::string& what) {
  if (!(found == expected)) fail<BadInput>("{}: found {}, expected {}", what, found, expected);
}

}  // namespace lockstep
