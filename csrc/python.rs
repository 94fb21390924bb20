//! The Python interpreter whose packages to build with.

/// Returns the interpreter that `FST_PYTHON` names, `python3` by default.
pub fn python() -> String {
    for name in ["FST_PYTHON", "PYTHONPATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    std::env::var("FST_PYTHON").unwrap_or_else(|_| "python3".into())
}
