// SPDX-License-Identifier: Apache-2.0
//
// The built binary `attend` against a scripted server: exit codes, messages, files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "client/npy.h"
#include "tests/client/cli_fixture.h"

namespace attend::client {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST_F(CliTest, HelpIsAnAnswerAndNamesEverySubcommand) {
  const Outcome help = RunAlone("--help");
  EXPECT_EQ(help.code, 0);
  for (const char* name :
       {"info", "models", "run", "session", "bench", "make-checkpoint", "inspect", "--server"}) {
    EXPECT_THAT(help.text, HasSubstr(name));
  }
  EXPECT_EQ(RunAlone("run --help").code, 0);
  EXPECT_THAT(RunAlone("run --help").text, HasSubstr("--no_append"));
}

TEST_F(CliTest, WrongUsageExitsWithTwoAndSaysWhereToLook) {
  for (const char* arguments : {"",
                                "benchmark",
                                "info --jsn",
                                "run --layer 0",
                                "run --input x.npy",
                                "--timeout 0 info",
                                "run --layer 0 --input x.npy --position 3",
                                "run --layer 0 --input x.npy --no_append",
                                "run --layer 0 --input x.npy --session s --rewind",
                                "run --layer 0 --input x.npy --mask diagonal",
                                "run --layer 0 --input x.npy --dtype f64",
                                "run --layer 0 --input x.npy --tolerance 1",
                                "run --layer 0 --input x.npy --heads 1",
                                "run --layer 0 --input x.npy --tokens t",
                                "run --layer 0 --input x.npy --maps m --heads -1",
                                "inspect",
                                "inspect a b",
                                "session",
                                "session show",
                                "session truncate s",
                                "session truncate s --length -1",
                                "make-checkpoint --preset bert-base",
                                "make-checkpoint --preset bert-huge --out d",
                                "make-checkpoint --preset bert-base --out d --layers 0"}) {
    const Outcome outcome = RunAlone(arguments);
    EXPECT_EQ(outcome.code, 2) << arguments << "\n" << outcome.text;
    EXPECT_THAT(outcome.text, AllOf(StartsWith("attend: "), HasSubstr("--help"))) << arguments;
  }
}

TEST_F(CliTest, AnUnreachableServerIsARemoteError) {
  server_.Stop();
  const Outcome outcome = Run("info");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.text, StartsWith("attend: UNAVAILABLE: server " + server_.address() + ": "));
}

TEST_F(CliTest, OutputThatCannotBeWrittenIsAnError) {
  for (const char* target : {" >/dev/full", " >&-"}) {
    const Outcome outcome = RunShell("sh -c '" ATTEND_BINARY_DIR "/bin/attend info --server " +
                                     server_.address() + target + "'");
    EXPECT_EQ(outcome.code, 2) << target;
    EXPECT_THAT(outcome.text, HasSubstr("standard output can't be written")) << target;
  }
}

TEST_F(CliTest, AServerThatIsNoAddressIsWrongUsage) {
  for (const char* address : {"''", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:x",
                              ":50051", "http://127.0.0.1:50051", "::1:50051", "unix:"}) {
    const Outcome outcome = RunAlone(std::string("--server ") + address + " info");
    EXPECT_EQ(outcome.code, 2) << address;
    EXPECT_THAT(outcome.text, HasSubstr("address: got")) << address;
  }
  for (const char* address : {"dns:///127.0.0.1:1", "[::1]:1", "unix:/nowhere"}) {
    const Outcome outcome = RunAlone(std::string("--timeout 2 --server ") + address + " info");
    EXPECT_EQ(outcome.code, 1) << address << outcome.text;
  }
}

TEST_F(CliTest, TheServerMayComeFromTheEnvironment) {
  const Outcome outcome =
      RunShell("ATTEND_SERVER=" + server_.address() + " " ATTEND_BINARY_DIR "/bin/attend info");
  EXPECT_EQ(outcome.code, 0) << outcome.text;
  EXPECT_THAT(outcome.text, HasSubstr("fake.host-1"));
}

TEST_F(CliTest, InfoAndModelsSpeakTextAndJson) {
  EXPECT_THAT(Run("info").text, HasSubstr("version       1.2.3"));
  EXPECT_THAT(Run("info --json").text, HasSubstr("\"message_bytes\": \"67108864\""));
  EXPECT_THAT(Run("models").text,
              AllOf(HasSubstr("tiny: llama"), HasSubstr("layer 0 .. 1: 2 wide")));
  EXPECT_THAT(Run("models --json").text, HasSubstr("\"d_model\": 2"));
}

TEST_F(CliTest, RunWritesTheOutputAndComparesIt) {
  const Outcome same =
      Run("run --layer 0 --input x.npy --output y.npy --compare x.npy --weights w.npy");
  EXPECT_EQ(same.code, 0) << same.text;
  EXPECT_THAT(same.text, HasSubstr("maximum absolute error 0, within"));
  auto output = ReadNpy(directory_ + "/y.npy");
  ASSERT_TRUE(output.ok());
  EXPECT_THAT(output->ToFloats(), testing::ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(ReadNpy(directory_ + "/w.npy")->shape, testing::ElementsAre(1, 1, 1));

  Write("z.npy", {1, 2, 3, 4.5});
  const Outcome different = Run("run --layer 0 --input x.npy --compare z.npy --tolerance 0.4");
  EXPECT_EQ(different.code, 1);
  EXPECT_THAT(different.text, HasSubstr("maximum absolute error 0.5, ABOVE"));
  EXPECT_EQ(Run("run --layer 0 --input x.npy --compare z.npy --tolerance 0.5").code, 0);

  Write("nan.npy", {1, 2, 3, NAN});
  EXPECT_EQ(Run("run --layer 0 --input x.npy --compare nan.npy --tolerance 1e30").code, 1);
  Write("short.npy", {1, 2});
  EXPECT_THAT(Run("run --layer 0 --input x.npy --compare short.npy").text,
              HasSubstr("got output shape [2, 2], wanted [1, 2]"));
}

TEST_F(CliTest, RunPassesItsFlagsOn) {
  ASSERT_EQ(
      Run("run --model m --layer 0 --input x.npy --mask causal --dtype bf16 --context x.npy").code,
      0);
  const v1::AttendRequest request = server_.seen("Attend").at(0).attend;
  EXPECT_EQ(request.model(), "m");
  EXPECT_EQ(request.mask(), v1::MASK_CAUSAL);
  EXPECT_EQ(request.output_dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(request.context().shape(0), 2);
}

TEST_F(CliTest, UnreadableFilesAreUsageErrors) {
  EXPECT_EQ(RunAlone("run --layer 0 --input absent.npy").code, 2);
  EXPECT_EQ(Run("run --layer 0 --input x.npy --output /nonexistent/y.npy").code, 2);
}

TEST_F(CliTest, UnwritableFilesAreNamedBeforeASessionIsAppendedTo) {
  const std::string id = OpenSession();
  const std::string run = "run --layer 0 --input x.npy --session " + id;
  std::filesystem::create_directory(directory_ + "/folder");
  Write("kept.npy", {7, 8});
  for (const std::string flag : {"--output", "--weights"}) {
    for (const auto& [path, why] : {std::pair{"absent/y.npy", "No such file or directory"},
                                    {"folder", "Is a directory"},
                                    {"x.npy/y.npy", "Not a directory"}}) {
      const Outcome outcome = Run(run + " " + flag + " " + path);
      EXPECT_EQ(outcome.code, 2);
      EXPECT_EQ(outcome.text, "attend: " + flag + ": " + path + ": " + why + "\n");
    }
  }
  EXPECT_EQ(server_.length(id, "0"), 0);
  EXPECT_TRUE(server_.seen("Attend").empty());
  // A call that fails leaves files as they were.
  EXPECT_EQ(Run(run + " --output new.npy --weights kept.npy --position 9").code, 1);
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/new.npy"));
  EXPECT_EQ(ReadNpy(directory_ + "/kept.npy")->ToFloats(), (std::vector<float>{7, 8}));
  EXPECT_EQ(Run(run + " --output /dev/null").code, 0);
}

TEST_F(CliTest, ARemoteErrorIsOneLineOfCodeReasonAndMessage) {
  v1::ErrorDetail detail;
  detail.set_reason(v1::UNKNOWN_LAYER);
  server_.FailNext({StatusWithDetail(grpc::NOT_FOUND, "layer: got \"9\"\nwanted 0..1", detail)});
  const Outcome outcome = Run("run --layer 9 --input x.npy");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(outcome.text, "attend: NOT_FOUND UNKNOWN_LAYER: layer: got \"9\" wanted 0..1\n");
}

TEST_F(CliTest, SessionsLiveFromOpenToClose) {
  const std::string id = OpenSession();
  EXPECT_THAT(id, StartsWith("fake.host-1.7."));
  const std::string run = "run --layer 0 --input x.npy --session " + id;
  EXPECT_THAT(Run(run).text, HasSubstr("session has 2 tokens in layer 0"));
  EXPECT_THAT(Run(run).text, HasSubstr("session has 4 tokens in layer 0"));
  EXPECT_THAT(Run(run + " --position 2 --rewind").text, HasSubstr("session has 4 tokens"));
  const Outcome mismatch = Run(run + " --position 1");
  EXPECT_EQ(mismatch.code, 1);
  EXPECT_THAT(mismatch.text, HasSubstr("FAILED_PRECONDITION POSITION_MISMATCH"));
  EXPECT_EQ(Run(run + " --no_append").code, 0);
  EXPECT_EQ(Run(run + " --no-append").code, 0);
  EXPECT_EQ(server_.length(id, "0"), 4);

  const Outcome fork = Run("session fork " + id + " --length 3");
  const std::string fork_id = fork.text.substr(0, fork.text.find('\n'));
  EXPECT_EQ(server_.length(fork_id, "0"), 3);
  EXPECT_EQ(Run("session truncate " + id + " --length 1").code, 0);
  EXPECT_EQ(server_.length(id, "0"), 1);
  EXPECT_THAT(Run("session show " + id).text, HasSubstr("layer 0       1 tokens"));
  EXPECT_THAT(Run("session show --json " + id).text, HasSubstr("\"id\": \"" + id + "\""));
  EXPECT_EQ(server_.open_sessions(), 2u);
  EXPECT_EQ(Run("session close " + id).code, 0);
  EXPECT_EQ(server_.open_sessions(), 1u);
  EXPECT_EQ(Run("session close " + id).code, 1);
}

TEST_F(CliTest, MakeCheckpointWritesADirectoryWithoutAServer) {
  const Outcome made = RunAlone(
      "make-checkpoint --preset transformer-base --layers 1 --heads 64"
      " --seed 7 --dtype bf16 --out made");
  EXPECT_EQ(made.code, 0) << made.text;
  EXPECT_THAT(made.text, Not(HasSubstr("\r")));  // progress only on a terminal
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/made/config.json"));
}

}  // namespace
}  // namespace attend::client
