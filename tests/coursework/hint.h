#pragma once
// HINT stands above an assertion, in the scope that it is for: it names the mistake that makes it
// fail most likely, and never the solution. The grader shows the last one before the failure.

#include "tests/support/catch.h"

#define HINT(text) INFO("hint: " text)
