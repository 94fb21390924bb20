//! Updates of existing tensors: all are written, or none is.

use super::ffi::{self, Value};
use super::{call, run};
use cxx::UniquePtr;
use fst::error::Result;
use std::path::Path;
use tch::Tensor;

/// New values of existing tensors, which wait for their commit. Returned by [`prepare_update`].
///
/// Dropping an update rolls it back.
pub struct Update {
    update: UniquePtr<ffi::Object>,
}

// SAFETY: calls of the object in C++ from several threads run one after another.
unsafe impl Send for Update {}

impl Update {
    /// Writes all values on the current streams of their devices, and sets the version. Reads no files.
    ///
    /// Returns an error of the kind [`Version`](fst::error::Kind::Version) if another load or update has written to one
    /// of the tensors since [`prepare_update`]. Nothing was written then.
    pub fn commit(self) -> Result<()> {
        call(ffi::call_method(&self.update, "commit")).map(drop)
    }

    /// Returns the version that the tensors get.
    pub fn version(&self) -> Result<Option<String>> {
        Ok(call(ffi::call_method(&self.update, "version"))?.texts.pop())
    }

    /// Returns the size of the staged values in bytes.
    pub fn staged_bytes(&self) -> Result<i64> {
        Ok(call(ffi::call_method(&self.update, "staged_bytes"))?.numbers.into_iter().sum())
    }
}

/// Reads new values of existing tensors, while the old values stay in use.
///
/// Each output must have the stored shape and dtype. The values need as much memory again, on the devices of the
/// outputs. After an error, no output has changed.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// # tch::Tensor::write_safetensors(&[("weight", tch::Tensor::from_slice(&[1f32, 2.0]))], "model.safetensors")?;
/// use tch::{Device, nn};
///
/// let store = nn::VarStore::new(Device::Cpu);
/// let weight = store.root().zeros("weight", &[2]);
/// let variables: Vec<_> = store.variables().into_iter().collect();
///
/// let update = fst_tch::prepare_update(&["model.safetensors"], &variables, Some("step-2"), None)?;
/// assert_eq!(weight.double_value(&[1]), 0.0);
/// update.commit()?;
/// assert_eq!(weight.double_value(&[1]), 2.0);
/// assert_eq!(fst_tch::version_of(&variables)?, Some("step-2".to_owned()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn prepare_update<P: AsRef<Path>, S: AsRef<str>, T: AsRef<Tensor>>(
    paths: &[P],
    outputs: &[(S, T)],
    version: Option<&str>,
    verify: Option<&str>,
) -> Result<Update> {
    let (names, tensors) = (Value::names(outputs), Value::tensors(outputs));
    let verify = Value::text(verify.unwrap_or_default());
    let arguments = [Value::paths(paths)?, names, tensors, Value::optional(version), verify];
    Ok(Update { update: call(ffi::object_of_operator("prepare_update", &arguments))? })
}

/// Returns the version of the contents of tensors, or `None` if they have none.
///
/// Returns an error of the kind [`Version`](fst::error::Kind::Version) if they have different versions.
pub fn version_of<S: AsRef<str>, T: AsRef<Tensor>>(tensors: &[(S, T)]) -> Result<Option<String>> {
    Ok(run("version_of", &[Value::tensors(tensors), Value::names(tensors)])?.texts.pop())
}

/// Sets the version of the contents of tensors, which the caller knows.
///
/// ```
/// let weight = tch::Tensor::from_slice(&[1f32, 2.0]);
/// fst_tch::set_version(&[("weight", &weight)], Some("step-1"))?;
/// assert_eq!(fst_tch::version_of(&[("weight", &weight)])?, Some("step-1".to_owned()));
/// # Ok::<(), fst::Error>(())
/// ```
pub fn set_version<S: AsRef<str>, T: AsRef<Tensor>>(tensors: &[(S, T)], version: Option<&str>) -> Result<()> {
    run("set_version", &[Value::tensors(tensors), Value::optional(version)]).map(drop)
}
