//! Nothing of the layer is Rust: build.rs compiles and links the C++ files beside this one.
