# cmake -DNVCC=… -DOUT=FILE -P kernels.cmake: compiles the kernels, and leaves in FILE.txt what for. It is a script, so
# that it needs neither make nor Ninja.
#
# Machine code for one of each generation since Ampere runs on all GPUs of that generation, and PTX of the oldest on
# whatever comes later: the driver compiles it. Those that this nvcc does not know are left out.
cmake_minimum_required(VERSION 3.20)
if(NOT ARCHITECTURES)
  set(ARCHITECTURES 80 90 100 120)
endif()
execute_process(COMMAND "${NVCC}" --list-gpu-code OUTPUT_VARIABLE KNOWN COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[0-9]+" KNOWN "${KNOWN}")
set(CODE "")
set(BUILT "")
foreach(ARCHITECTURE IN LISTS ARCHITECTURES)
  if(NOT ARCHITECTURE IN_LIST KNOWN)
    message(STATUS "no kernels for sm_${ARCHITECTURE}: this nvcc does not know it")
    continue()
  endif()
  if(NOT BUILT)
    list(APPEND CODE -gencode=arch=compute_${ARCHITECTURE},code=compute_${ARCHITECTURE})
    set(BUILT "compute_${ARCHITECTURE}")
  endif()
  list(APPEND CODE -gencode=arch=compute_${ARCHITECTURE},code=sm_${ARCHITECTURE})
  string(APPEND BUILT " sm_${ARCHITECTURE}")
endforeach()
if(NOT BUILT)
  message(FATAL_ERROR "${NVCC} knows none of the architectures ${ARCHITECTURES}")
endif()
execute_process(
  COMMAND "${NVCC}" -fatbin -std=c++17 -O3 --threads 0 ${CODE} -o "${OUT}" "${CMAKE_CURRENT_LIST_DIR}/kernels.cu"
  COMMAND_ERROR_IS_FATAL ANY)
file(WRITE "${OUT}.txt" "${BUILT}")
