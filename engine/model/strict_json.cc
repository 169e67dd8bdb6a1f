// SPDX-License-Identifier: Apache-2.0
#include "engine/model/strict_json.h"

#include <cctype>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace attend {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 32;           // config.json of multi-tower models nests 4 deep
constexpr size_t kMaxStringBytes = 65536;  // chat templates stand in other files
constexpr std::string_view kWhitespace = " \t\r\n";

// Sees every token of the text once and stops at the first violation.
class Checker final : public nlohmann::json_sax<json> {
 public:
  const std::string& violation() const { return violation_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool string(string_t& value) override { return BoundedString(value); }
  bool start_object(size_t) override { return Enter(); }
  bool start_array(size_t) override { return Enter(); }
  bool end_object() override { return Leave(); }
  bool end_array() override { return Leave(); }
  bool key(string_t& name) override {
    if (!BoundedString(name)) return false;
    if (keys_.back().insert(name).second) return true;
    return Refuse(absl::StrCat("key ", Quoted(name), " stands twice in one object"));
  }
  bool parse_error(size_t position, const std::string&, const json::exception& error) override {
    // The library's text starts with an identifier of its own in brackets.
    std::string_view text = error.what();
    if (const size_t end = text.find("] "); end != text.npos) text.remove_prefix(end + 2);
    return Refuse(absl::StrCat("byte ", position, ": ",
                               absl::CHexEscape(absl::string_view(text.data(), text.size()))));
  }

 private:
  bool Refuse(std::string violation) {
    violation_ = std::move(violation);
    return false;
  }
  bool BoundedString(const std::string& value) {
    if (value.size() <= kMaxStringBytes) return true;
    return Refuse(
        absl::StrCat("a string of ", value.size(), " bytes, wanted at most ", kMaxStringBytes));
  }
  bool Enter() {
    if (keys_.size() == kMaxDepth)
      return Refuse(absl::StrCat("nested more than ", kMaxDepth, " deep"));
    keys_.emplace_back();
    return true;
  }
  bool Leave() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::unordered_set<std::string>>
      keys_;  // of the objects that are open; arrays: empty
  std::string violation_;
};

}  // namespace

std::string Quoted(std::string_view name) {
  constexpr size_t kShown = 100;
  const std::string_view shown = name.substr(0, kShown);
  return absl::StrCat("'", absl::CHexEscape(absl::string_view(shown.data(), shown.size())),
                      name.size() > kShown ? "...'" : "'");
}

absl::StatusOr<json> ParseStrictJson(std::string_view text, const std::string& where) {
  const size_t first = text.find_first_not_of(kWhitespace);
  if (first == text.npos || text[first] != '{') {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": wanted one JSON object, got ",
                     first == text.npos ? "nothing" : "something else"));
  }
  // The library takes a NUL byte for the end of the text.
  if (const size_t nul = text.find('\0'); nul != text.npos) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": NUL at byte ", nul));
  }
  Checker checker;
  if (!json::sax_parse(text, &checker)) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", checker.violation()));
  }
  return json::parse(text, nullptr, /*allow_exceptions=*/false);
}

}  // namespace attend
