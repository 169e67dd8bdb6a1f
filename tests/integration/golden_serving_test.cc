// SPDX-License-Identifier: Apache-2.0
//
// Every checkpoint of tests/golden behind one server: its cases packed, padded, call by call in
// sessions, with contexts and with attention weights, against the outputs of the libraries they
// come from.
#include <limits>

#include "tests/integration/server_process.h"
#include "tests/integration/wire_calls.h"
#include "tests/support/golden.h"
#include "tests/support/matchers.h"

namespace attend {
namespace {

constexpr double kProbabilityTolerance = 1e-5;

// Rows [begin, end) of sequence `index` of a padded [sequences, longest, width] tensor.
std::vector<float> RowsOf(const GoldenTensor& tensor, size_t index, int64_t begin, int64_t end) {
  const int64_t longest = tensor.shape[1], width = tensor.shape[2];
  const auto first =
      tensor.values.begin() + (static_cast<int64_t>(index) * longest + begin) * width;
  return {first, first + (end - begin) * width};
}

enum class Form { kPacked, kPadded };

// The valid rows one after another, or the padded tensor with NaN in the padding.
void SetRows(const GoldenTensor& tensor, const std::vector<int64_t>& lengths, Form form,
             v1::Tensor* wire) {
  const int64_t longest = tensor.shape[1], width = tensor.shape[2];
  std::vector<float> values;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const std::vector<float> rows = RowsOf(tensor, i, 0, lengths[i]);
    values.insert(values.end(), rows.begin(), rows.end());
    if (form == Form::kPadded) {
      values.resize((i + 1) * static_cast<size_t>(longest * width),
                    std::numeric_limits<float>::quiet_NaN());
    }
  }
  const auto count = static_cast<int64_t>(lengths.size());
  SetTensor(values,
            form == Form::kPadded
                ? std::vector<int64_t>{count, longest, width}
                : std::vector<int64_t>{static_cast<int64_t>(values.size()) / width, width},
            wire);
}

class GoldenServingTest : public testing::TestWithParam<std::string> {
 protected:
  static void SetUpTestSuite() {
    std::vector<std::string> flags = {"--compute=fp32", "--kv_dtype=f32"};
    for (const std::string& variant : GoldenVariants()) flags.push_back(GoldenModelFlag(variant));
    server_ = new ServerProcess(flags);
    ASSERT_TRUE(server_->WaitForServing()) << server_->log();
    auto connected = client::Client::Connect(server_->address(), {.deadline = kPatience});
    ASSERT_TRUE(connected.ok()) << connected.error().ToString();
    client_ = new client::Client(*connected);
  }
  static void TearDownTestSuite() {
    delete client_;
    delete server_;
    client_ = nullptr;
    server_ = nullptr;
  }

  // Plain modules leave the mask to the caller.
  v1::Mask MaskOf(const GoldenCase& golden) const {
    return plain_ && golden.causal ? v1::MASK_CAUSAL : v1::MASK_FROM_MODEL;
  }

  // `listed`: with sequences.
  void TryFull(const GoldenCase& golden, Form form, Form context_form, bool listed) const {
    SCOPED_TRACE(testing::Message() << "padded " << (form == Form::kPadded) << ", context padded "
                                    << (context_form == Form::kPadded) << ", listed " << listed);
    const bool cross = golden.role == "cross";
    v1::AttendRequest request;
    request.set_model(GetParam());
    request.set_layer(golden.layer);
    request.set_mask(MaskOf(golden));
    SetRows(golden.hidden_states, golden.lengths, form, request.mutable_hidden_states());
    if (cross)
      SetRows(golden.context, golden.context_lengths, context_form, request.mutable_context());
    for (size_t i = 0; listed && i < golden.lengths.size(); ++i) {
      v1::Sequence& sequence = *request.add_sequences();
      sequence.set_length(golden.lengths[i]);
      if (cross) sequence.set_context_length(golden.context_lengths[i]);
    }
    const bool weights = !golden.attention_weights.shape.empty();
    if (weights) request.mutable_weights()->set_mode(v1::WeightsRequest::FULL);
    auto response = client_->Attend(request);
    ASSERT_TRUE(response.ok()) << response.error().ToString();
    client::Tensor output = client::TakeFromWire(response->mutable_output());
    const v1::Tensor& input = request.hidden_states();
    ASSERT_TRUE(std::equal(output.shape.begin(), output.shape.end() - 1, input.shape().begin()));
    CheckRows(golden, form, output);
    if (!weights) return;
    ASSERT_EQ(response->weights_size(), static_cast<int>(golden.lengths.size()));
    for (int i = 0; i < response->weights_size(); ++i) {
      CheckWeights(golden, i,
                   client::TakeFromWire(response->mutable_weights(i)->mutable_weights()));
    }
  }

  static void CheckRows(const GoldenCase& golden, Form form, const client::Tensor& output) {
    const std::vector<float> values = output.ToFloats();
    const int64_t longest = golden.output.shape[1], width = golden.output.shape[2];
    auto next = values.begin();
    for (size_t i = 0; i < golden.lengths.size(); ++i) {
      const int64_t rows = golden.lengths[i] * width;
      ASSERT_LE(rows, values.end() - next);
      EXPECT_TRUE(MatchesWithin(std::vector<float>(next, next + rows),
                                RowsOf(golden.output, i, 0, golden.lengths[i]),
                                golden.float32_tolerance));
      next += rows;
      if (form == Form::kPacked) continue;
      const int64_t padding = longest * width - rows;
      ASSERT_LE(padding, values.end() - next);
      EXPECT_EQ(std::vector<float>(next, next + padding),
                std::vector<float>(static_cast<size_t>(padding), 0.0f));
      next += padding;
    }
    EXPECT_EQ(next, values.end());
  }

  static void CheckWeights(const GoldenCase& golden, int index, const client::Tensor& weights) {
    const std::vector<int64_t>& shape = golden.attention_weights.shape;  // [B, heads, rows, keys]
    const int64_t heads = shape[1], rows = golden.lengths[static_cast<size_t>(index)];
    const int64_t keys =
        golden.role == "cross" ? golden.context_lengths[static_cast<size_t>(index)] : rows;
    ASSERT_EQ(weights.shape, (std::vector<int64_t>{heads, rows, keys}));
    std::vector<float> expected;
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t row = 0; row < rows; ++row) {
        const float* first =
            &golden.attention_weights
                 .values[static_cast<size_t>(((index * heads + head) * shape[2] + row) * shape[3])];
        expected.insert(expected.end(), first, first + keys);
      }
    }
    EXPECT_TRUE(MatchesWithin(weights.ToFloats(), expected, kProbabilityTolerance));
  }

  void TryIncremental(const GoldenCase& golden) const {
    ASSERT_EQ(golden.lengths.size(), 1u);
    auto session = client_->OpenSession(GetParam());
    ASSERT_TRUE(session.ok()) << session.error().ToString();
    const int64_t width = golden.hidden_states.shape[2];
    std::vector<float> context;
    int64_t row = 0;
    for (int64_t chunk : golden.chunks) {
      const std::vector<float> rows = RowsOf(golden.hidden_states, 0, row, row + chunk);
      client::AttendOptions options{.mask = MaskOf(golden)};
      if (golden.role == "cross" && row == 0) {
        context = RowsOf(golden.context, 0, 0, golden.context_lengths[0]);
        options.context = {context, {golden.context_lengths[0], golden.context.shape[2]}};
      }
      auto answer = session->Attend(golden.layer, {rows, {chunk, width}}, options);
      ASSERT_TRUE(answer.ok()) << answer.error().ToString();
      EXPECT_TRUE(MatchesWithin(answer->output.ToFloats(),
                                RowsOf(golden.output, 0, row, row + chunk),
                                golden.float32_tolerance));
      row += chunk;
      EXPECT_EQ(answer->positions,
                std::vector<int64_t>{golden.role == "cross" ? golden.context_lengths[0] : row});
    }
  }

  static ServerProcess* server_;
  static client::Client* client_;
  bool plain_ = GetParam().starts_with("torch_");
};

ServerProcess* GoldenServingTest::server_ = nullptr;
client::Client* GoldenServingTest::client_ = nullptr;

TEST_P(GoldenServingTest, AgreesWithTheLibraryItComesFrom) {
  auto golden = ReadGolden(GetParam());
  ASSERT_THAT(golden, IsOk());
  ASSERT_FALSE(golden->cases.empty());
  for (const GoldenCase& one : golden->cases) {
    SCOPED_TRACE(one.id + ", layer " + one.layer + ", " + one.role + ", " + one.kind);
    if (one.kind == "incremental") {
      TryIncremental(one);
      continue;
    }
    for (Form form : {Form::kPacked, Form::kPadded}) {
      TryFull(one, form, Form::kPacked, true);
      if (one.role == "cross") TryFull(one, form, Form::kPadded, true);
      if (one.lengths.size() == 1) TryFull(one, form, form, false);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, GoldenServingTest, testing::ValuesIn(GoldenVariants()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace attend
