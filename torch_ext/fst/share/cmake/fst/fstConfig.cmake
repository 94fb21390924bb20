# find_package(fst): the target fst::fst, which brings the header fst/fst.h, the library libfst.so with the operators,
# and PyTorch. CMAKE_PREFIX_PATH must name where both packages are:
#
#     python -c 'import fst, torch; print(fst.cmake_prefix_path, torch.utils.cmake_prefix_path, sep=";")'

include(CMakeFindDependencyMacro)

# A PyTorch built for CUDA looks for a CUDA toolkit, which a program that calls PyTorch and nothing below it does not
# need. It stops looking where the toolkit's target exists already, so an empty one stands in for it. A program that
# needs the toolkit finds Torch before fst.
if(NOT Torch_FOUND AND NOT TARGET torch::cudart)
  add_library(torch::cudart INTERFACE IMPORTED)
endif()
find_dependency(Torch)

get_filename_component(_fst_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(_fst_library "${_fst_root}/libfst.so")
if(NOT EXISTS "${_fst_library}")
  set(fst_FOUND FALSE)
  set(fst_NOT_FOUND_MESSAGE "${_fst_library} is missing: run `make build` in the checkout, or install the package")
  return()
endif()

# PyTorch's binary interface changes with every release. The library contains the release that it was built for.
file(STRINGS "${_fst_library}" _fst_built_for REGEX "fst [0-9.]+: built for PyTorch [0-9]+\\.[0-9]+" LIMIT_COUNT 1)
string(REGEX MATCH "built for PyTorch ([0-9]+\\.[0-9]+)" _fst_built_for "${_fst_built_for}")
set(_fst_built_for "${CMAKE_MATCH_1}")
if(NOT "${Torch_VERSION}" MATCHES "^${_fst_built_for}\\.")
  set(fst_FOUND FALSE)
  set(fst_NOT_FOUND_MESSAGE
      "${_fst_library} was built for PyTorch ${_fst_built_for}, but this is PyTorch ${Torch_VERSION}")
  return()
endif()

if(NOT TARGET fst::fst)
  add_library(fst::library SHARED IMPORTED)
  set_target_properties(fst::library PROPERTIES IMPORTED_LOCATION "${_fst_library}")
  add_library(fst::fst INTERFACE IMPORTED)
  target_include_directories(fst::fst INTERFACE "${_fst_root}/include")
  target_compile_features(fst::fst INTERFACE cxx_std_20)
  # Operators are called by name, so programs refer to no symbol of the library, and some linkers drop such libraries.
  # The target fst::library adds its directory to the program's run path.
  target_link_libraries(
    fst::fst INTERFACE "-Wl,--push-state,--no-as-needed,${_fst_library},--pop-state" fst::library ${TORCH_LIBRARIES})
endif()

unset(_fst_root)
unset(_fst_library)
unset(_fst_built_for)
