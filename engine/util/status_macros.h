// SPDX-License-Identifier: Apache-2.0
//
// Early return on errors; Debian's abseil does not ship these macros.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define ATTEND_CONCAT_INNER(a, b) a##b
#define ATTEND_CONCAT(a, b) ATTEND_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expression)                                                         \
  do {                                                                                      \
    if (absl::Status return_if_error_status = (expression); !return_if_error_status.ok()) { \
      return return_if_error_status;                                                        \
    }                                                                                       \
  } while (false)

// ASSIGN_OR_RETURN(auto value, ComputeValue());
#define ASSIGN_OR_RETURN(declaration, expression) \
  ASSIGN_OR_RETURN_IMPL(ATTEND_CONCAT(assign_or_return_, __LINE__), declaration, expression)
#define ASSIGN_OR_RETURN_IMPL(result, declaration, expression) \
  auto result = (expression);                                  \
  if (!result.ok()) return std::move(result).status();         \
  declaration = *std::move(result)
