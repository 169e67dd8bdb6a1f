// SPDX-License-Identifier: Apache-2.0
//
// `attend inspect`: what a server would make of a checkpoint folder, without a server, as text.
// What differs by a layer's number only is told once. The JSON comes from engine/model/inspect.cc.
#include "engine/model/inspect.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <functional>
#include <set>

#include "absl/strings/escaping.h"
#include "client/cli/command.h"

namespace attend::cli {
namespace {

// ---- Names that differ by a number ----

// "h.12.attn" is "h." + 12 + ".attn": the first part between dots that is all digits.
struct NumberedName {
  explicit NumberedName(const std::string& name) : before(name) {
    for (size_t begin = 0; begin < name.size();) {
      const size_t end = std::min(name.find('.', begin), name.size());
      const std::string part = name.substr(begin, end - begin);
      if (!part.empty() && part.size() <= 6 && std::all_of(part.begin(), part.end(), [](char c) {
            return std::isdigit(static_cast<unsigned char>(c)) != 0;
          })) {
        before = name.substr(0, begin);
        number = std::stoi(part);
        after = name.substr(end);
        return;
      }
      begin = end + 1;
    }
  }

  std::string before;
  int number = -1;  // none
  std::string after;
};

// "0 .. 5", "0, 2 .. 4"
std::string RangesText(const std::set<int>& numbers) {
  std::string text;
  for (auto first = numbers.begin(); first != numbers.end();) {
    auto last = first;
    for (auto next = std::next(first); next != numbers.end() && *next == *last + 1; ++next) {
      last = next;
    }
    if (!text.empty()) text += ", ";
    text += std::to_string(*first);
    if (last != first) text += " .. " + std::to_string(*last);
    first = std::next(last);
  }
  return text;
}

// Things of equal description whose names differ by their number only.
struct Group {
  NumberedName name;  // of the first
  std::string description;
  std::set<int> numbers;
  size_t first = 0;  // index of the first

  // "model.layers.{0 .. 31}.self_attn"; the same with another first name of the group.
  std::string Text() const { return Text(name); }
  std::string Text(const NumberedName& of) const {
    if (of.number < 0) return of.before;
    if (numbers.size() < 2) return of.before + std::to_string(of.number) + of.after;
    return of.before + "{" + RangesText(numbers) + "}" + of.after;
  }
};

bool AlwaysAlike(size_t, size_t) { return true; }

// In the order of their first members. `alike` says whether two of equal description are alike in
// what the description leaves out.
std::vector<Group> Grouped(size_t count, const std::function<std::string(size_t)>& name,
                           const std::function<std::string(size_t)>& description,
                           const std::function<bool(size_t, size_t)>& alike = AlwaysAlike) {
  std::vector<Group> groups;
  for (size_t i = 0; i < count; ++i) {
    Group one{
        .name = NumberedName(name(i)), .description = description(i), .numbers = {}, .first = i};
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& other) {
      return one.name.number >= 0 && other.name.number >= 0 &&
             other.name.before == one.name.before && other.name.after == one.name.after &&
             other.description == one.description && alike(other.first, i);
    });
    if (group == groups.end()) group = groups.insert(groups.end(), std::move(one));
    group->numbers.insert(NumberedName(name(i)).number);
  }
  return groups;
}

// ---- Layers ----

std::string MaskText(const AttentionSpec& spec) {
  std::string text = spec.cross             ? "cross-attention"
                     : spec.mask_selectable ? "mask selectable, context possible"
                     : spec.causal          ? "causal"
                                            : "bidirectional";
  if (spec.window > 0) text += ", window " + std::to_string(spec.window);
  if (spec.context_width != spec.d_model) {
    text += ", context " + std::to_string(spec.context_width) + " wide";
  }
  return text;
}

std::string NumberText(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

std::string PositionsText(const ModelLayer& layer) {
  const RopeSpec& rope = layer.spec.rope;
  if (rope.dim == 0) return PositionRuleName(layer.spec);
  std::string text = "rope over " + std::to_string(rope.dim) + " of " +
                     std::to_string(layer.spec.head_dim) +
                     (rope.pairing == RopePairing::kHalf ? ", halves" : ", neighbours") + " paired";
  if (!layer.rope_text.empty()) text += ", " + layer.rope_text;
  if (rope.attention_factor != 1) text += ", cos and sin x " + NumberText(rope.attention_factor);
  return text;
}

std::string ExtrasText(const AttentionSpec& spec) {
  std::string text = "scale " + NumberText(spec.scale);
  if (spec.softcap > 0) text += ", softcap " + NumberText(spec.softcap);
  if (spec.clip_qkv > 0) text += ", q k v clipped to +-" + NumberText(spec.clip_qkv);
  if (spec.qk_norm != QkNorm::kNone) {
    text += ", q and k normalised per head with eps " + NumberText(spec.qk_norm_eps);
  }
  if (!spec.sinks.empty()) text += ", sinks";
  return text;
}

std::string LayerText(const ModelLayer& layer, DType kv_dtype) {
  const AttentionSpec& spec = layer.spec;
  std::string heads = std::to_string(spec.q_heads);
  if (spec.kv_heads != spec.q_heads) {
    heads += " query and " + std::to_string(spec.kv_heads) + " key/value";
  }
  std::string widths = std::to_string(spec.head_dim);
  if (spec.v_head_dim != spec.head_dim) {
    widths += ", values of " + std::to_string(spec.v_head_dim);
  }
  const std::string sessions = spec.keeps_history()
                                   ? "yes, " + BytesText(GeometryOf(spec, kv_dtype).TokenBytes()) +
                                         " a token in " + DTypeName(kv_dtype)
                                   : "no: it looks both ways";
  return "  widths     " + std::to_string(spec.d_model) + " in, " +
         std::to_string(spec.output_width) + " out, " + heads + " heads of " + widths +
         "\n  mask       " + MaskText(spec) + "\n  positions  " + PositionsText(layer) +
         "\n  scores     " + ExtrasText(spec) + "\n  sessions   " + sessions + "\n  weights    " +
         DTypeName(layer.weight_dtype) + ", " + BytesText(layer.weight_bytes) + "\n  feed it    " +
         layer.input_point + "\n";
}

void PrintLayers(const Checkpoint& checkpoint) {
  const DType kv_dtype = KvDTypeOf(checkpoint);
  const auto& layers = checkpoint.layers;
  for (const Group& group : Grouped(
           layers.size(), [&](size_t i) { return layers[i].name; },
           [&](size_t i) { return LayerText(layers[i], kv_dtype); },
           [&](size_t i, size_t j) { return layers[i].spec == layers[j].spec; })) {
    const bool plain = group.name.before.empty() && group.name.after.empty();
    std::printf("\nlayer %s\n%s  module     %s\n",
                plain ? RangesText(group.numbers).c_str() : group.Text().c_str(),
                group.description.c_str(),
                group.Text(NumberedName(layers[group.first].module)).c_str());
  }
}

// ---- Tensors ----

std::string Joined(const std::vector<std::string>& texts) {
  std::string joined;
  for (const std::string& text : texts) joined += joined.empty() ? text : ", " + text;
  return joined;
}

// Without what a hostile file could make a terminal do.
std::string Harmless(const std::string& text) { return absl::Utf8SafeCHexEscape(text); }

// Name and description in two columns.
void PrintColumns(const std::vector<std::pair<std::string, std::string>>& rows) {
  size_t width = 0;
  for (const auto& row : rows) width = std::max(width, row.first.size());
  for (const auto& [name, text] : rows) {
    std::printf("  %-*s  %s\n", static_cast<int>(width), name.c_str(), text.c_str());
  }
}

// Those of one kind, under a heading with their number and bytes; each one with `all`.
void PrintTensors(const std::string& heading, const std::vector<const InspectedTensor*>& tensors,
                  bool all) {
  if (tensors.empty()) return;
  int64_t bytes = 0;
  for (const InspectedTensor* tensor : tensors) bytes += tensor->bytes;
  std::printf("\n%s: %zu tensor%s, %s\n", heading.c_str(), tensors.size(),
              tensors.size() == 1 ? "" : "s", BytesText(bytes).c_str());
  const auto describe = [&](size_t i) {
    const InspectedTensor& tensor = *tensors[i];
    std::string text = Harmless(tensor.dtype) + " " + ShapeText(tensor.shape);
    if (!tensor.holds.empty()) text += "  " + Joined(tensor.holds);
    return all ? text + "  " + tensor.file : text;
  };
  std::vector<std::pair<std::string, std::string>> rows;
  if (all) {
    for (size_t i = 0; i < tensors.size(); ++i)
      rows.emplace_back(Harmless(tensors[i]->name), describe(i));
  } else {
    for (const Group& group : Grouped(
             tensors.size(), [&](size_t i) { return tensors[i]->name; }, describe)) {
      rows.emplace_back(Harmless(group.Text()), group.description);
    }
  }
  PrintColumns(rows);
}

void PrintAllTensors(const Inspection& inspection, bool all) {
  std::vector<const InspectedTensor*> used;
  std::vector<std::pair<std::string, std::vector<const InspectedTensor*>>> ignored;  // by reason
  for (const InspectedTensor& tensor : inspection.tensors) {
    if (!tensor.holds.empty()) {
      used.push_back(&tensor);
      continue;
    }
    const auto same = std::find_if(ignored.begin(), ignored.end(), [&](const auto& reason) {
      return reason.first == tensor.ignored_because;
    });
    if (same != ignored.end()) {
      same->second.push_back(&tensor);
    } else {
      ignored.push_back({tensor.ignored_because, {&tensor}});
    }
  }
  PrintTensors("used", used, all);
  for (const auto& [reason, tensors] : ignored) {
    PrintTensors(reason.empty() ? "found" : "ignored, " + reason, tensors, all);
  }
}

// ---- The command ----

void PrintAccepted(const Inspection& inspection) {
  const Checkpoint& checkpoint = *inspection.checkpoint;
  int64_t weight_bytes = 0;
  int64_t token_bytes = 0;
  for (const ModelLayer& layer : checkpoint.layers) {
    weight_bytes += layer.weight_bytes;
    if (!layer.spec.keeps_history() || layer.spec.cross) continue;
    token_bytes += GeometryOf(layer.spec, KvDTypeOf(checkpoint)).TokenBytes();
  }
  std::printf("%s: accepted\nfamily       %s\nlayers       %zu\nweights      %s, %s of attention\n",
              inspection.directory.c_str(), checkpoint.family.c_str(), checkpoint.layers.size(),
              DTypeName(checkpoint.weight_dtype), BytesText(weight_bytes).c_str());
  if (token_bytes > 0) {
    std::printf("sessions     %s a token in all layers\n", BytesText(token_bytes).c_str());
  }
  if (checkpoint.max_positions > 0) {
    std::printf("positions    %ld at most, says config.json\n", checkpoint.max_positions);
  }
  std::printf("fingerprint  %s\n", checkpoint.fingerprint.c_str());
}

void PrintRefused(const Inspection& inspection) {
  std::set<std::string> files;
  int64_t bytes = 0;
  for (const InspectedTensor& tensor : inspection.tensors) {
    files.insert(tensor.file);
    bytes += tensor.bytes;
  }
  std::printf(
      "%s: refused\nmodel_type   %s\n", inspection.directory.c_str(),
      inspection.model_type.empty() ? "not readable" : Harmless(inspection.model_type).c_str());
  if (inspection.tensors_unreadable.empty()) {
    std::printf("tensors      %zu in %zu file%s, %s\n", inspection.tensors.size(), files.size(),
                files.size() == 1 ? "" : "s", BytesText(bytes).c_str());
  } else {
    std::printf("tensors      not readable: %s\n", inspection.tensors_unreadable.c_str());
  }
}

struct InspectFlags {
  std::string directory;
  bool json = false;
  bool tensors = false;
};

int Inspect(const InspectFlags& flags) {
  const bool terminal = isatty(STDERR_FILENO) != 0;
  if (terminal) std::fprintf(stderr, "reading %s ...", flags.directory.c_str());
  const auto inspection = InspectCheckpoint(flags.directory);
  if (terminal) std::fprintf(stderr, "\r\033[K");
  if (!inspection.ok()) {
    std::fprintf(stderr, "attend: %s\n", std::string(inspection.status().message()).c_str());
    return kUsage;
  }
  const bool accepted = inspection->checkpoint.has_value();
  if (!accepted) std::fprintf(stderr, "attend: %s\n", inspection->refused_because.c_str());
  if (flags.json) {
    std::printf("%s", InspectionJson(*inspection).c_str());
  } else if (accepted) {
    PrintAccepted(*inspection);
    PrintLayers(*inspection->checkpoint);
    PrintAllTensors(*inspection, flags.tensors);
  } else {
    PrintRefused(*inspection);
    if (flags.tensors) PrintAllTensors(*inspection, true);
  }
  return accepted ? kOk : kFailed;
}

}  // namespace

void AddInspect(CLI::App& app, Globals& globals) {
  CLI::App* command = app.add_subcommand(
      "inspect", "Show what a server makes of a checkpoint folder: layers, tensors, why refused");
  command->footer(
      "Works without a server and reads all attention weights, as a server does.\n"
      "Exit codes: 0 accepted, 1 refused (the reason goes to standard error), 2 no readable "
      "folder.");
  auto flags = std::make_shared<InspectFlags>();
  command->add_option("DIR", flags->directory, "Folder with config.json and *.safetensors")
      ->required();
  command->add_flag("--json", flags->json, "Print JSON, every layer and tensor");
  command->add_flag("--tensors", flags->tensors, "Print every tensor on its own line");
  command->callback([&globals, flags] { globals.exit_code = Inspect(*flags); });
}

}  // namespace attend::cli
