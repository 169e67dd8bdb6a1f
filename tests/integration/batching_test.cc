// SPDX-License-Identifier: Apache-2.0
//
// Many clients at once: their requests share batches, and every answer has the bits it has alone.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <deque>
#include <future>

#include "tests/integration/server_process.h"
#include "tests/integration/wire_calls.h"
#include "tests/support/seed.h"

namespace attend {
namespace {

constexpr int kClients = 32;
constexpr int kSteps = kSanitizer ? 5 : 25;
constexpr int64_t kWidth = 64;  // llama_gqa4

TEST(BatchingTest, RequestsOfSeveralClientsAndLengthsShareBatches) {
  ServerProcess server({GoldenModelFlag("llama_gqa4")});
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  std::atomic<int64_t> shared{0}, mixed{0}, failed{0};
  const auto end = std::chrono::steady_clock::now() + kPatience;
  const auto client = [&](int64_t length) {
    std::mt19937_64 random(static_cast<uint64_t>(length));
    const WireClient wire(server.address());
    const v1::AttendRequest request =
        RowsRequest("", "0", kWidth, RandomValues(random, length * kWidth));
    while (mixed.load() < 10 && std::chrono::steady_clock::now() < end) {
      const auto reply = wire.Attend(request);
      if (!reply.ok()) ++failed;
      const v1::Timing& timing = reply.value.timing();
      if (timing.batch_sequences() < 2) continue;
      ++shared;
      // Others of this length alone would make batch_sequences x length.
      if (timing.batch_tokens() != timing.batch_sequences() * length) ++mixed;
    }
  };
  std::vector<std::future<void>> clients;
  for (int64_t length : {1, 2, 3, 5, 17, 64, 65, 130}) {
    clients.push_back(std::async(std::launch::async, client, length));
  }
  for (auto& one : clients) one.get();
  EXPECT_EQ(failed.load(), 0);
  EXPECT_GT(shared.load(), 0);
  EXPECT_GE(mixed.load(), 10);
  const MetricValues metrics = server.Metrics();
  EXPECT_EQ(metrics.at("attend_batch_sequences_count"), metrics.at("attend_batches_total"));
  EXPECT_GT(metrics.at("attend_batch_sequences_sum"), metrics.at("attend_batch_sequences_count"));
  EXPECT_EQ(metrics.at("attend_padding_tokens_total"), 0);
  EXPECT_EQ(WhatIsLeft(server), "");
}

// What a client asked and got, to be asked again alone.
struct Record {
  v1::AttendRequest request;
  std::vector<float> history;  // the rows the session had before, if it names one
  std::string output;          // bytes
};

// One client: stateless requests on every kind of layer, and one session that it appends to,
// rewinds, truncates, forks, looks ahead from and gives up calls on.
class RandomClient {
 public:
  RandomClient(const std::string& address, uint64_t seed) : wire_(address), random_(seed) {}

  void Run() {
    Reopen();
    for (int step = 0; step < kSteps && error_.empty(); ++step) Step();
    if (!session_.empty()) Expect(wire_.Close(session_), "close");
  }

  const std::vector<Record>& records() const { return records_; }
  const std::string& error() const { return error_; }

 private:
  int64_t Pick(int64_t lowest, int64_t highest) {
    return std::uniform_int_distribution<int64_t>(lowest, highest)(random_);
  }
  int64_t cached() const { return static_cast<int64_t>(history_.size()) / kWidth; }

  bool Expect(const Ended& ended, const std::string& what) {
    if (!ended.ok() && error_.empty()) error_ = what + ": " + ended.error.ToString();
    return ended.ok();
  }

  void Reopen() {
    v1::OpenSessionRequest request;
    request.set_model("llama_gqa4");
    const auto opened = wire_.Open(request);
    if (!Expect(opened, "open")) return;
    session_ = opened.value.id();
    history_.clear();
  }

  void Step() {
    switch (Pick(0, 7)) {
      case 0:
        return Stateless();
      case 1:
        return Append(cached(), false, false);
      case 2:
        return Append(Pick(0, cached()), true, false);
      case 3:
        return Append(Pick(0, cached()), true, true);
      case 4:
        return Append(cached(), false, true);
      case 5:
        return GiveUp();
      case 6:
        return Cut();
      default:
        return Fork();
    }
  }

  void Stateless() {
    struct Kind {
      const char* model;
      const char* layer;
      int64_t width;
    };
    static constexpr Kind kKinds[] = {{"llama_gqa4", "0", 64},
                                      {"llama_gqa4", "1", 64},
                                      {"bert_decoder", "0.self", 32},
                                      {"bert_decoder", "1.cross", 32}};
    const Kind& kind = kKinds[Pick(0, 3)];
    const int64_t count = Pick(1, 4);
    v1::AttendRequest request;
    int64_t rows = 0, keys = 0;
    const bool cross = std::string(kind.layer).ends_with("cross");
    for (int64_t i = 0; i < count; ++i) {
      v1::Sequence& sequence = *request.add_sequences();
      sequence.set_length(Pick(0, 70));
      rows += sequence.length();
      if (cross) sequence.set_context_length(Pick(0, 70));
      keys += sequence.context_length();
    }
    request.set_model(kind.model);
    request.set_layer(kind.layer);
    SetTensor(RandomValues(random_, rows * kind.width), {rows, kind.width},
              request.mutable_hidden_states());
    if (cross) {
      SetTensor(RandomValues(random_, keys * kind.width), {keys, kind.width},
                request.mutable_context());
    }
    const auto reply = wire_.Attend(request);
    if (Expect(reply, "stateless")) records_.push_back({request, {}, reply.value.output().data()});
  }

  v1::AttendRequest Rows(int64_t position, bool rewind, bool no_append) {
    const int64_t rows = Pick(0, 3) == 0 ? Pick(1, 150) : Pick(1, 5);
    v1::AttendRequest request = SessionRequest(
        "llama_gqa4", "0", kWidth, RandomValues(random_, rows * kWidth), session_, position);
    request.mutable_sequences(0)->set_rewind(rewind);
    request.mutable_sequences(0)->set_no_append(no_append);
    return request;
  }

  void Keep(const v1::AttendRequest& request, const v1::AttendResponse& response) {
    const v1::Sequence& sequence = request.sequences(0);
    Record record{request, history_, response.output().data()};
    record.history.resize(static_cast<size_t>(sequence.position() * kWidth));
    if (!sequence.no_append()) {
      const std::string& bytes = request.hidden_states().data();
      const auto* values = reinterpret_cast<const float*>(bytes.data());
      history_ = record.history;
      history_.insert(history_.end(), values, values + bytes.size() / sizeof(float));
    }
    if (response.positions(0) != cached() && error_.empty()) {
      error_ = "positions: got " + std::to_string(response.positions(0)) + ", wanted " +
               std::to_string(cached());
    }
    records_.push_back(std::move(record));
  }

  void Append(int64_t position, bool rewind, bool no_append) {
    const v1::AttendRequest request = Rows(position, rewind, no_append);
    const auto reply = wire_.Attend(request);
    if (Expect(reply, "append")) Keep(request, reply.value);
  }

  // A call given up at any moment was applied whole or not at all; the same one with `rewind`
  // repairs it.
  void GiveUp() {
    v1::AttendRequest request = Rows(cached(), false, false);
    {
      grpc::ClientContext context;
      grpc::CompletionQueue queue;
      const auto call = wire_.stub().AsyncAttend(&context, request, &queue);
      v1::AttendResponse response;
      grpc::Status status;
      call->Finish(&response, &status, nullptr);
      void* tag = nullptr;
      bool ok = false;
      const auto soon = std::chrono::system_clock::now() + std::chrono::microseconds(Pick(0, 3000));
      if (queue.AsyncNext(&tag, &ok, soon) == grpc::CompletionQueue::TIMEOUT) {
        context.TryCancel();
        queue.Next(&tag, &ok);
      }
      if (!status.ok() && status.error_code() != grpc::CANCELLED)
        Expect(EndOf(status, context), "give up");
    }
    const auto found = wire_.Get(session_);
    if (!Expect(found, "get")) return;
    const int64_t length = found.value.length();
    if (length != cached() && length != cached() + request.sequences(0).length()) {
      error_ = "a call given up left " + std::to_string(length) + " tokens";
    }
    request.mutable_sequences(0)->set_rewind(true);
    const auto again = wire_.Attend(request);
    if (Expect(again, "repair")) Keep(request, again.value);
  }

  void Cut() {
    const int64_t length = Pick(0, cached());
    if (Expect(wire_.Truncate(session_, length), "truncate")) {
      history_.resize(static_cast<size_t>(length * kWidth));
    }
  }

  // Goes on with the fork or with the original, after the other one wrote and ended.
  void Fork() {
    const auto fork = wire_.Fork(session_);
    if (!Expect(fork, "fork")) return;
    std::string other = fork.value.id();
    if (Pick(0, 1) == 0) std::swap(other, session_);
    const v1::AttendRequest writes = SessionRequest(
        "llama_gqa4", "0", kWidth, RandomValues(random_, 3 * kWidth), other, cached());
    const auto wrote = wire_.Attend(writes);
    if (Expect(wrote, "other")) records_.push_back({writes, history_, wrote.value.output().data()});
    Expect(wire_.Close(other), "close other");
  }

  const WireClient wire_;
  std::mt19937_64 random_;
  std::string session_;
  std::vector<float> history_;  // rows of `session_`, layer 0
  std::vector<Record> records_;
  std::string error_;
};

// The answer when nothing else runs: a fresh session that is given the history in one call.
std::string OutputAlone(const WireClient& wire, const Record& record) {
  if (record.request.sequences(0).session_id().empty()) {
    return wire.Attend(record.request).value.output().data();
  }
  v1::OpenSessionRequest open;
  open.set_model("llama_gqa4");
  const std::string session = wire.Open(open).value.id();
  if (!record.history.empty()) {
    wire.Attend(SessionRequest("llama_gqa4", "0", kWidth, record.history, session, 0));
  }
  v1::AttendRequest request = record.request;
  request.mutable_sequences(0)->set_session_id(session);
  const std::string output = wire.Attend(request).value.output().data();
  wire.Close(session);
  return output;
}

void RunRound(const ServerProcess& server, uint64_t seed) {
  std::deque<RandomClient> clients;
  for (uint64_t i = 0; i < kClients; ++i) clients.emplace_back(server.address(), seed + i);
  std::vector<std::thread> threads;
  for (RandomClient& client : clients) threads.emplace_back([&client] { client.Run(); });
  for (std::thread& thread : threads) thread.join();
  const WireClient wire(server.address());
  int64_t compared = 0;
  for (const RandomClient& client : clients) {
    ASSERT_EQ(client.error(), "");
    for (const Record& record : client.records()) {
      ASSERT_EQ(record.output.size(), record.request.hidden_states().data().size());
      ASSERT_TRUE(OutputAlone(wire, record) == record.output)
          << "other bits alone: " << record.request.model() << " " << record.request.layer() << ", "
          << record.request.sequences(0).length() << " rows after "
          << record.history.size() / kWidth;
      ++compared;
    }
  }
  EXPECT_GT(compared, kClients);
}

TEST(BatchingTest, ThirtyTwoClientsGetTheBitsOfTheirLoneRunsAndLeaveNothingBehind) {
  const uint64_t seed = TestSeed();
  ServerProcess server({GoldenModelFlag("llama_gqa4"), GoldenModelFlag("bert_decoder")});
  ASSERT_TRUE(server.WaitForServing()) << server.log();
  ASSERT_NO_FATAL_FAILURE(RunRound(server, seed));
  ASSERT_EQ(WhatIsLeft(server), "");
  const int64_t before = server.resident_bytes();
  ASSERT_NO_FATAL_FAILURE(RunRound(server, seed + kClients));
  EXPECT_EQ(WhatIsLeft(server), "");
  const MetricValues metrics = server.Metrics();
  EXPECT_EQ(metrics.at("attend_kv_bytes{state=\"free\"}"), 16 << 20);
  EXPECT_EQ(metrics.at("attend_launched_after_deadline_total"), 0);
  // The first round touched the arena, the pools and gRPC's buffers for as many clients.
  const int64_t allowed = int64_t{kSanitizer ? 1024 : 8} << 20;
  EXPECT_LT(server.resident_bytes() - before, allowed);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.WaitForExit(), 0);
}

}  // namespace
}  // namespace attend
