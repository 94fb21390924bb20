//! Libraries of the simulators, whose functions have the types of their crates.

use libloading::Library;
use std::sync::LazyLock;

static SIMCUDA: LazyLock<Library> = LazyLock::new(|| open("libfst_simcuda.so"));
static SIMCUFILE: LazyLock<Library> = LazyLock::new(|| open("libfst_simcufile.so"));

/// Opens a library that replaces another one, until the process ends.
///
/// The library must be open before any code opens the one that it replaces. The dynamic linker then resolves the SONAME to
/// this library. It is a dev-dependency, so every `cargo test` builds it. Cargo puts the libraries of dependencies into the
/// directory of the test programs, `deps` of the profile. The file name of a cdylib has no hash.
fn open(file: &str) -> Library {
    let test = std::env::current_exe().expect("the path of the running test");
    let path = test.parent().expect("the directory of the test program").join(file);
    // SAFETY: the library has no initializers with preconditions.
    unsafe { Library::new(&path) }.unwrap_or_else(|error| panic!("cannot open {}: {error}", path.display()))
}

/// Returns a function of a simulator's library. `twin` is the same function of the crate, which has a state of its own.
pub fn symbol<F: Copy>(path: &str, _twin: F) -> F {
    let library = if path.starts_with("fst_simcuda") { &SIMCUDA } else { &SIMCUFILE };
    let name = path.rsplit([':', ' ']).next().unwrap_or_default();
    // SAFETY: both are compiled from one source.
    unsafe { *library.get(name).expect(name) }
}

/// Calls a function of a simulator's library, which has the state of the simulator.
macro_rules! call {
    ($krate:ident$(::$path:ident)+($($argument:expr),* $(,)?)) => {
        call!(@function extern "C" fn($(call!(@argument $argument)),*) -> _, $krate$(::$path)+)($($argument),*)
    };
    (unsafe $krate:ident$(::$path:ident)+($($argument:expr),* $(,)?)) => {
        call!(@function unsafe extern "C" fn($(call!(@argument $argument)),*) -> _, $krate$(::$path)+)($($argument),*)
    };
    (@function $function:ty, $path:path) => {{
        let twin: $function = $path;
        $crate::sim::library::symbol(stringify!($path), twin)
    }};
    (@argument $argument:expr) => { _ };
}
