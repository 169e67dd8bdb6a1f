// SPDX-License-Identifier: Apache-2.0
//
// `attend run`: one Attend call with .npy files in and out, stateless or as a step of a session,
// a comparison with a stored result, and pictures of the weights (maps.cc).
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "client/cli/command.h"
#include "client/cli/maps.h"
#include "client/npy.h"

namespace attend::cli {
namespace {

struct RunFlags {
  std::string model, layer, input, output, context, session, weights, compare;
  MapFlags maps;
  std::vector<int> heads;  // of the weights; empty = all
  int64_t position = -1;   // -1 = where the session stands
  bool rewind = false;
  bool no_append = false;
  v1::Mask mask = v1::MASK_FROM_MODEL;
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  double tolerance = 1e-4;
};

const std::vector<std::pair<std::string, v1::Mask>> kMasks = {
    {"model", v1::MASK_FROM_MODEL},
    {"causal", v1::MASK_CAUSAL},
    {"bidirectional", v1::MASK_BIDIRECTIONAL}};

int FailFile(const client::Error& error) {
  std::fprintf(stderr, "attend: %s\n", error.message.c_str());
  return kUsage;
}

// Of one sequence.
int64_t PackedRows(const client::Tensor& tensor) {
  return tensor.shape.size() < 2 ? 0 : tensor.shape[tensor.shape.size() - 2];
}

int64_t Sequences(const v1::Tensor& states) {
  return states.shape_size() == 3 ? states.shape(0) : 1;
}

// The largest |a - b|; NaN on either side counts as infinite, equal infinities as 0.
double MaxError(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const double error = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

int Compare(const client::Tensor& output, const client::Tensor& wanted, double tolerance) {
  if (output.shape != wanted.shape) {
    std::fprintf(stderr, "attend: --compare: got output shape %s, wanted %s\n",
                 ShapeText(output.shape).c_str(), ShapeText(wanted.shape).c_str());
    return kFailed;
  }
  const double error = MaxError(output.ToFloats(), wanted.ToFloats());
  const bool good = error <= tolerance;
  std::printf("maximum absolute error %.3g, %s the tolerance of %g\n", error,
              good ? "within" : "ABOVE", tolerance);
  return good ? kOk : kFailed;
}

std::vector<client::Tensor> TakeWeights(v1::AttendResponse* response) {
  std::vector<client::Tensor> sequences;
  for (v1::AttentionWeights& weights : *response->mutable_weights()) {
    sequences.push_back(client::TakeFromWire(weights.mutable_weights()));
  }
  return sequences;
}

// One sequence [heads, rows, keys]; several of equal shape [sequences, heads, rows, keys].
client::Result<void> WriteWeights(const std::string& path,
                                  const std::vector<client::Tensor>& sequences) {
  client::Tensor all;
  for (const client::Tensor& one : sequences) {
    all.dtype = one.dtype;
    all.shape = one.shape;
    all.data += one.data;
  }
  if (sequences.size() > 1) all.shape.insert(all.shape.begin(), std::ssize(sequences));
  return client::WriteNpy(path, all.view());
}

// Reads the files into the request; the session's sequence is added by AddSessionSequence.
int FillFromFiles(const RunFlags& flags, v1::AttendRequest* request, int64_t* rows,
                  int64_t* context_rows) {
  auto input = client::ReadNpy(flags.input);
  if (!input.ok()) return FailFile(input.error());
  *rows = PackedRows(*input);
  client::CopyToWire(input->view(), request->mutable_hidden_states());
  if (!flags.context.empty()) {
    auto context = client::ReadNpy(flags.context);
    if (!context.ok()) return FailFile(context.error());
    *context_rows = PackedRows(*context);
    client::CopyToWire(context->view(), request->mutable_context());
  }
  return kOk;
}

bool IsCross(const RunFlags& flags, int64_t context_rows) {
  return context_rows >= 0 || client::IsCrossName(flags.layer);
}

// Without a trace: what exists is not opened, which a pipe's reader would notice. 0 or errno.
int WhyNotWritable(const std::string& path) {
  struct stat found = {};
  if (stat(path.c_str(), &found) == 0) {
    if (S_ISDIR(found.st_mode)) return EISDIR;
    return access(path.c_str(), W_OK) == 0 ? 0 : errno;
  }
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return errno;
  close(file);
  unlink(path.c_str());
  return 0;
}

// Files that can't be written must not be noticed after a session was appended to.
int CheckWritable(const RunFlags& flags) {
  for (const auto& [flag, path] :
       {std::pair("--output", &flags.output), std::pair("--weights", &flags.weights)}) {
    if (path->empty()) continue;
    if (const int why = WhyNotWritable(*path); why != 0) {
      std::fprintf(stderr, "attend: %s: %s: %s\n", flag, path->c_str(), std::strerror(why));
      return kUsage;
    }
  }
  return kOk;
}

// A cross-attention layer takes no position: its history is the context.
client::Result<void> AddSessionSequence(const client::Client& client, const RunFlags& flags,
                                        int64_t rows, int64_t context_rows,
                                        v1::AttendRequest* request) {
  v1::Sequence* sequence = request->add_sequences();
  sequence->set_session_id(flags.session);
  sequence->set_length(rows);
  sequence->set_rewind(flags.rewind);
  sequence->set_no_append(flags.no_append);
  if (context_rows >= 0) sequence->set_context_length(context_rows);
  if (flags.position >= 0) {
    sequence->set_position(flags.position);
  } else if (!IsCross(flags, context_rows)) {
    auto session = client.AttachSession(flags.session);
    if (!session.ok()) return session.error();
    sequence->set_position(session->position(flags.layer));
  }
  return {};
}

void PrintSummary(const v1::AttendResponse& response) {
  const v1::Timing& timing = response.timing();
  const auto& shape = response.output().shape();
  std::printf("output %s %s, queued %.3f ms, computed %.3f ms in a batch of %ld tokens\n",
              DTypeText(response.output().dtype()).c_str(),
              ShapeText({shape.begin(), shape.end()}).c_str(),
              static_cast<double>(timing.queue_us()) / 1000,
              static_cast<double>(timing.compute_us()) / 1000, timing.batch_tokens());
}

v1::AttendRequest RequestFor(const RunFlags& flags) {
  v1::AttendRequest request;
  request.set_model(flags.model);
  request.set_layer(flags.layer);
  request.set_mask(flags.mask);
  request.set_output_dtype(flags.dtype);
  if (!flags.weights.empty() || !flags.maps.directory.empty()) {
    request.mutable_weights()->set_mode(v1::WeightsRequest::FULL);
    request.mutable_weights()->mutable_heads()->Assign(flags.heads.begin(), flags.heads.end());
  }
  return request;
}

// The answer may be far larger than with the output alone: says what makes it smaller.
int FailAttend(client::Error error, const v1::AttendRequest& request) {
  if (error.reason == v1::TOO_LARGE && request.has_weights()) {
    error.message += "; --heads asks for the weights of some heads only";
  }
  return Fail(error);
}

int DrawMaps(const client::Client& client, const RunFlags& flags, const MapLabels& labels,
             bool cross, std::vector<client::Tensor> weights) {
  MapSource source{.model = flags.model,
                   .layer = flags.layer,
                   .heads = flags.heads,
                   .cross = cross,
                   .sequences = std::move(weights)};
  if (source.model.empty()) {  // the only one
    auto models = client.ListModels();
    if (models.ok() && models->size() == 1) source.model = models->front().name();
  }
  auto written = WriteMaps(flags.maps.directory, labels, source);
  if (!written.ok()) return FailFile(written.error());
  std::printf("%d pictures in %s\n", *written, flags.maps.directory.c_str());
  return kOk;
}

int Run(const Globals& globals, const RunFlags& flags) {
  v1::AttendRequest request = RequestFor(flags);
  int64_t rows = 0;
  int64_t context_rows = -1;
  if (int code = FillFromFiles(flags, &request, &rows, &context_rows); code != kOk) return code;
  if (int code = CheckWritable(flags); code != kOk) return code;
  const bool cross = IsCross(flags, context_rows);
  client::Tensor wanted;
  if (!flags.compare.empty()) {
    auto stored = client::ReadNpy(flags.compare);
    if (!stored.ok()) return FailFile(stored.error());
    wanted = *std::move(stored);
  }
  MapLabels labels;
  if (!flags.maps.directory.empty()) {
    MapInput input{
        .rows = rows * Sequences(request.hidden_states()), .context_rows = {}, .cross = cross};
    if (context_rows >= 0) input.context_rows = context_rows * Sequences(request.context());
    auto prepared = PrepareMaps(flags.maps, input);
    if (!prepared.ok()) return FailFile(prepared.error());
    labels = *std::move(prepared);
  }

  auto client = Connect(globals);
  if (!client.ok()) return Fail(client.error());
  if (!flags.session.empty()) {
    auto added = AddSessionSequence(*client, flags, rows, context_rows, &request);
    if (!added.ok()) return Fail(added.error());
  }
  auto response = client->Attend(request);
  if (!response.ok()) return FailAttend(response.error(), request);

  PrintSummary(*response);
  if (!flags.session.empty() && response->positions_size() > 0) {
    std::printf("session has %ld tokens in layer %s\n", response->positions(0),
                flags.layer.c_str());
  }
  std::vector<client::Tensor> weights = TakeWeights(&*response);
  if (!flags.weights.empty()) {
    auto written = WriteWeights(flags.weights, weights);
    if (!written.ok()) return FailFile(written.error());
  }
  const client::Tensor output = client::TakeFromWire(response->mutable_output());
  if (!flags.output.empty()) {
    auto written = client::WriteNpy(flags.output, output.view());
    if (!written.ok()) return FailFile(written.error());
  }
  if (!flags.maps.directory.empty()) {
    const int code = DrawMaps(*client, flags, labels, cross, std::move(weights));
    if (code != kOk) return code;
  }
  return flags.compare.empty() ? kOk : Compare(output, wanted, flags.tolerance);
}

void AddMapOptions(CLI::App& run, RunFlags& flags) {
  CLI::Option* maps =
      run.add_option("--maps", flags.maps.directory, "Draw the weights of every head here, as PNG")
          ->type_name("DIR");
  run.add_option("--tokens", flags.maps.tokens, "Labels of the rows, one a line (UTF-8)")
      ->needs(maps)
      ->type_name("FILE");
  run.add_option("--context_tokens", flags.maps.context_tokens, "Labels of the context's rows")
      ->needs(maps)
      ->type_name("FILE");
  run.add_option("--heads", flags.heads, "Heads of --weights and --maps (default: all)")
      ->delimiter(',')
      ->check(NotNegative())
      ->type_name("H,...");
}

}  // namespace

void AddRun(CLI::App& app, Globals& globals) {
  CLI::App* run = app.add_subcommand("run", "Compute attention over the rows of a .npy file");
  run->footer(
      "Files hold float32, float16 or bfloat16. A 2-D input is one sequence [tokens, d_model],\n"
      "a 3-D one is [batch, tokens, d_model].\n"
      "--maps writes layer-L.png, all heads on one colour scale, and layer-L-head-H.png, each on\n"
      "its own; -sequence-S follows the layer where there are several. Grey is a weight of "
      "exactly\n"
      "0, as keys that a row may not see have. Above 2048 tokens (320 with all heads) a pixel is\n"
      "the largest of several weights. Labels show ASCII and Latin letters, without accents; "
      "other\n"
      "characters are a box.");
  auto flags = std::make_shared<RunFlags>();
  run->add_option("--model", flags->model, "Model (default: the only one)")->type_name("NAME");
  run->add_option("--layer", flags->layer, "Layer, as `attend models` names it")
      ->required()
      ->type_name("NAME");
  run->add_option("--input", flags->input, "Hidden states")->required()->type_name("X.npy");
  run->add_option("--output", flags->output, "Where to write the output")->type_name("Y.npy");
  run->add_option("--context", flags->context, "Source states of cross-attention")
      ->type_name("C.npy");
  CLI::Option* session =
      run->add_option("--session", flags->session, "Append to this session")->type_name("ID");
  CLI::Option* position =
      run->add_option("--position", flags->position,
                      "Tokens the layer must have cached (default: what it has)")
          ->check(NotNegative())
          ->needs(session)
          ->type_name("N");
  run->add_flag("--rewind", flags->rewind, "Cut the layer to --position first")->needs(position);
  run->add_flag("--no_append,--no-append", flags->no_append, "Leave the history as it was")
      ->needs(session);
  run->add_option("--mask", flags->mask, "Where the layer leaves it open (default: model)")
      ->transform(OneOf(kMasks))
      ->type_name("model|causal|bidirectional");
  run->add_option("--weights", flags->weights, "Write the attention weights [heads, rows, keys]")
      ->type_name("W.npy");
  AddMapOptions(*run, *flags);
  run->add_option("--dtype", flags->dtype, "Type of the output (default: the input's)")
      ->transform(OneOf(kWireDTypes))
      ->type_name("f32|f16|bf16");
  CLI::Option* compare = run->add_option("--compare", flags->compare,
                                         "Print the maximum absolute error against this output")
                             ->type_name("Z.npy");
  run->add_option("--tolerance", flags->tolerance, "Largest error --compare accepts")
      ->check(NotNegative())
      ->needs(compare)
      ->type_name("X")
      ->capture_default_str();
  run->callback([&globals, flags] {
    if (!flags->heads.empty() && flags->weights.empty() && flags->maps.directory.empty()) {
      throw CLI::RequiresError("--heads", "--weights or --maps");
    }
    globals.exit_code = Run(globals, *flags);
  });
}

}  // namespace attend::cli
