// SPDX-License-Identifier: Apache-2.0
//
// The built binary `attend` in a folder of its own, with a scripted server beside it. Base of the
// tests of the command line.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "client/npy.h"
#include "tests/client/fake_attention.h"
#include "tests/support/shell.h"

namespace attend::client {

class CliTest : public testing::Test {
 protected:
  CliTest() : directory_(testing::TempDir() + "cli_test." + std::to_string(getpid())) {
    std::filesystem::create_directories(directory_);
    Write("x.npy", {1, 2, 3, 4});
  }
  ~CliTest() override { std::filesystem::remove_all(directory_); }

  // Without a server: nothing may be sent.
  Outcome RunAlone(const std::string& arguments) const {
    return RunShell("cd " + directory_ + " && " ATTEND_BINARY_DIR "/bin/attend " + arguments);
  }
  Outcome Run(const std::string& arguments) const {
    return RunAlone(arguments + " --server " + server_.address());
  }
  void Write(const std::string& name, const std::vector<float>& values) const {
    const int64_t rows = static_cast<int64_t>(values.size()) / 2;
    ASSERT_TRUE(WriteNpy(directory_ + "/" + name, {values, {rows, 2}}).ok());
  }
  std::string OpenSession() const {
    const Outcome opened = Run("session open");
    EXPECT_EQ(opened.code, 0) << opened.text;
    return opened.text.substr(0, opened.text.find('\n'));
  }

  const std::string directory_;
  FakeAttention server_;
};

}  // namespace attend::client
