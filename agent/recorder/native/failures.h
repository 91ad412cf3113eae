// Decides whether a call that raised an exception had communicated before: `judge_failure` in
// agent/recorder/calls.py explains how.

#pragma once

#include <c10/util/Exception.h>

#include <cstring>
#include <exception>
#include <stdexcept>
#include <typeinfo>

namespace {

enum FailureRule : int { NO_RULE = 0, ARGUMENT_ERRORS = 1, CHECKS = 2 };
enum class FailureOutcome { UNKNOWN, COMMUNICATED, NOT_MADE };

FailureOutcome judge_failure(const std::exception& error, int rule) {
  if (rule == NO_RULE)
    return FailureOutcome::COMMUNICATED;
  if (dynamic_cast<const c10::ValueError*>(&error) || dynamic_cast<const c10::TypeError*>(&error) ||
      dynamic_cast<const c10::IndexError*>(&error) ||
      dynamic_cast<const c10::NotImplementedError*>(&error) ||
      dynamic_cast<const std::invalid_argument*>(&error) ||
      dynamic_cast<const std::out_of_range*>(&error))
    return FailureOutcome::NOT_MADE;
  if (dynamic_cast<const c10::DistError*>(&error))
    return FailureOutcome::COMMUNICATED;
  if (rule != CHECKS)
    return FailureOutcome::UNKNOWN;
  if (typeid(error) == typeid(c10::Error)) {
    const auto& checked = static_cast<const c10::Error&>(error);
    const bool is_device_error = strstr(checked.what_without_backtrace(), "CUDA error");
    return is_device_error ? FailureOutcome::UNKNOWN : FailureOutcome::NOT_MADE;
  }
  // The errors that gloo itself raises are no errors of torch.
  return strstr(error.what(), "/gloo/") ? FailureOutcome::COMMUNICATED : FailureOutcome::UNKNOWN;
}

} // namespace
