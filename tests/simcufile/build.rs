//! Sets the SONAME of libcufile, so that `dlopen` resolves to this library if it is loaded first.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcufile.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
