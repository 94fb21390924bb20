//! Gives the library the name of the real one, so that whoever looks for that finds this one where it is open already.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcufile.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
