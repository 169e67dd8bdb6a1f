# Installs the build into a temporary prefix and builds client/example.cc outside the tree from it.
#   cmake -DBINARY_DIR=... -DSOURCE_DIR=... -DGENERATOR=... -P install_test.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${ARGN}: exit code ${code}\n${text}")
  endif()
  set(text "${text}" PARENT_SCOPE)
endfunction()

set(work ${BINARY_DIR}/install_test)
file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${BINARY_DIR} --prefix ${work}/prefix)

foreach(file bin/attend include/attend_client.h include/attend/v1/attend.pb.h
        include/attend/v1/attend.grpc.pb.h share/attend/proto/attend/v1/attend.proto)
  if(NOT EXISTS ${work}/prefix/${file})
    message(FATAL_ERROR "not installed: ${file}")
  endif()
endforeach()
run(${work}/prefix/bin/attend --help)

# The package must not ask for the engine or what it is built with.
file(GLOB_RECURSE package ${work}/prefix/*attend-*.cmake)
foreach(file ${package})
  file(STRINGS ${file} lines REGEX "dnnl|hwy|attend_engine|attend_model|attend_system_proto")
  if(lines)
    message(FATAL_ERROR "${file} names the engine: ${lines}")
  endif()
endforeach()

file(COPY ${SOURCE_DIR}/client/example.cc DESTINATION ${work}/outside)
file(WRITE ${work}/outside/CMakeLists.txt [[
cmake_minimum_required(VERSION 3.25)
project(outside LANGUAGES CXX)
find_package(attend REQUIRED)
add_executable(example example.cc)
target_link_libraries(example PRIVATE attend::client)
]])
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${work}/outside -B ${work}/outside/build
    -DCMAKE_PREFIX_PATH=${work}/prefix)
run(${CMAKE_COMMAND} --build ${work}/outside/build)
# Nobody listens at this address: the program starts and says so.
execute_process(COMMAND ${work}/outside/build/example unix:${work}/nobody RESULT_VARIABLE code
  ERROR_VARIABLE text)
if(NOT code EQUAL 1 OR NOT text MATCHES "UNAVAILABLE")
  message(FATAL_ERROR "example: exit code ${code}\n${text}")
endif()
file(REMOVE_RECURSE ${work})
