# kvtier_stamp(STAMP FOLDER [EXCLUDE]): the digest of the sources in this folder, as kvtier_core/native.py computes it,
# without the paths that match the regular expression. When a source changes CMake is run again.
function(kvtier_stamp STAMP FOLDER)
  file(GLOB_RECURSE SOURCES RELATIVE "${FOLDER}" CONFIGURE_DEPENDS "${FOLDER}/*.cpp" "${FOLDER}/*.h" "${FOLDER}/*.cu"
       "${FOLDER}/*.cmake" "${FOLDER}/CMakeLists.txt")
  if(ARGN)
    list(FILTER SOURCES EXCLUDE REGEX "${ARGN}")
  endif()
  list(SORT SOURCES COMPARE STRING)
  set(LISTING "")
  foreach(SOURCE IN LISTS SOURCES)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${FOLDER}/${SOURCE}")
    file(SHA256 "${FOLDER}/${SOURCE}" DIGEST)
    string(APPEND LISTING "${DIGEST} ${SOURCE}\n")
  endforeach()
  string(SHA256 DIGEST "${LISTING}")
  set(${STAMP} "${DIGEST}" PARENT_SCOPE)
endfunction()
