# The CUDA engine on the emulated device: a plugin, and what opens it in a folder of their own, so that programs in
# ${CMAKE_BINARY_DIR}/bin never see it. Included by CMakeLists.txt; nothing here is installed
# (tests/simt/not_shipped_test.cmake).
set(emulated_bin ${CMAKE_BINARY_DIR}/simt/bin)
file(GLOB emulated_host CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/engine/cuda/*.cc)

add_library(attend_engine_cuda_emulated MODULE)
attend_emulated_sources(attend_engine_cuda_emulated ${emulated_host})
set_target_properties(attend_engine_cuda_emulated PROPERTIES OUTPUT_NAME attend-engine-cuda PREFIX ""
  LIBRARY_OUTPUT_DIRECTORY ${emulated_bin}
  CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_link_libraries(attend_engine_cuda_emulated PRIVATE attend_emulated_kernels attend_stand_in attend_spec attend_util absl::strings)
target_link_options(attend_engine_cuda_emulated PRIVATE -Wl,--exclude-libs,ALL)

# The server beside it, for tests/integration/cuda_emulated_test.py.
add_executable(attend_simt_server ${CMAKE_SOURCE_DIR}/server/main.cc)
set_target_properties(attend_simt_server PROPERTIES OUTPUT_NAME attend-server
  RUNTIME_OUTPUT_DIRECTORY ${emulated_bin})
target_link_libraries(attend_simt_server PRIVATE attend_server_lib)
add_dependencies(attend_simt_server attend_engine_cuda_emulated)

# attend_emulated_suite(NAME SOURCES... LIBS ...): the CUDA cases of an engine suite. With the emulation's own checks;
# under sanitizers without them, and without the suites that would take half an hour: the kernels' tests beside this
# file have the same kernels and the checks there, too.
set(emulated_filter *Cuda*)
set(emulated_checks 1)
if(ATTEND_SANITIZE)
  set(emulated_filter *EngineMemoryTest*Cuda*:*EngineLayerTest*Cuda*:*GoldenTest*Cuda*)
  set(emulated_checks 0)
endif()
function(attend_emulated_suite name)
  cmake_parse_arguments(arg "" "" "LIBS" ${ARGN})
  list(TRANSFORM arg_UNPARSED_ARGUMENTS PREPEND ${CMAKE_SOURCE_DIR}/tests/engine/)
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${emulated_bin})
  target_link_libraries(${name} PRIVATE ${arg_LIBS} GTest::gmock GTest::gtest GTest::gtest_main)
  add_dependencies(${name} attend_engine_cuda_emulated)
  add_test(NAME ${name} COMMAND ${name} --gtest_filter=${emulated_filter})
  # A case that is skipped here for want of a device is an error: the plugin would be missing.
  set_tests_properties(${name} PROPERTIES LABELS unit TIMEOUT 1800
    ENVIRONMENT "ATTEND_EMULATED_CHECKS=${emulated_checks};ASAN_OPTIONS=detect_stack_use_after_return=0" FAIL_REGULAR_EXPRESSION "got cuda, wanted auto or cpu")
endfunction()

attend_emulated_suite(engine_contract_emulated_test engine_contract_test.cc engine_nan_test.cc
  engine_layer_test.cc engine_memory_test.cc LIBS attend_test_support)
attend_emulated_suite(bit_identity_emulated_test bit_identity_test.cc LIBS attend_test_support)
attend_emulated_suite(golden_emulated_test golden_test.cc LIBS attend_test_support attend_test_golden)

add_test(NAME emulation_not_shipped_test COMMAND ${CMAKE_COMMAND} -D BINARY_DIR=${CMAKE_BINARY_DIR}
  -P ${CMAKE_CURRENT_SOURCE_DIR}/not_shipped_test.cmake)
set_tests_properties(emulation_not_shipped_test PROPERTIES LABELS unit)
