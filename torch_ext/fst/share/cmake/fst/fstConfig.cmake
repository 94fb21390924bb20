# find_package(fst): the target fst::fst, which brings the header fst/fst.h, the library with the operators, and
# PyTorch. CMAKE_PREFIX_PATH must name where both packages are:
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

# The package has a library for each release of PyTorch, whose binary interface changes with every minor release.
get_filename_component(_fst_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" _fst_release "${Torch_VERSION}")
set(_fst_library "${_fst_root}/libfst_torch_${_fst_release}.so")
if(NOT EXISTS "${_fst_library}")
  file(GLOB _fst_libraries RELATIVE "${_fst_root}" "${_fst_root}/libfst_torch_*.so")
  set(fst_FOUND FALSE)
  if(_fst_libraries)
    string(REGEX REPLACE "libfst_torch_([0-9.]+)\\.so" "\\1" _fst_libraries "${_fst_libraries}")
    string(REPLACE ";" ", " _fst_libraries "${_fst_libraries}")
    set(fst_NOT_FOUND_MESSAGE
        "fst in ${_fst_root} was built for PyTorch ${_fst_libraries}, but this is PyTorch ${Torch_VERSION}")
  else()
    set(fst_NOT_FOUND_MESSAGE "${_fst_library} is missing: run `make build` in the checkout, or install the package")
  endif()
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
unset(_fst_release)
