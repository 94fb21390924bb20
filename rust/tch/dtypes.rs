//! Dtypes that a load requests, as kinds of tch.

use fst::dtype::Dtype;
use fst::error::{Error, Kind as ErrorKind, Result};
use tch::Kind;

/// Dtypes to cast tensors to: one for all, or one for each name or pattern (`*`, `?`, `[...]`).
///
/// A name takes precedence over patterns, and a pattern over later ones. `None` and tensors that match nothing keep the
/// stored dtype. A pattern that decides for no tensor is an error, except `*`.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # std::env::set_current_dir(&directory)?;
/// # let tensor = |value: f32| tch::Tensor::from_slice(&[value]);
/// # tch::Tensor::write_safetensors(&[("w", tensor(1.0)), ("w_scale", tensor(2.0))], "model.safetensors")?;
/// use tch::{Device, Kind};
///
/// let dtypes = [("*_scale", None), ("*", Some(Kind::BFloat16))];
/// let weights = fst_tch::load_file("model.safetensors", Device::Cpu, dtypes, None)?;
/// for (name, tensor) in &weights {
///     assert_eq!(tensor.kind(), if name == "w_scale" { Kind::Float } else { Kind::BFloat16 });
/// }
/// # assert_eq!(weights.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dtypes {
    /// Kinds for names and patterns.
    rules: Vec<(String, Option<Kind>)>,
}

impl From<Kind> for Dtypes {
    fn from(kind: Kind) -> Dtypes {
        Dtypes::from([("*", Some(kind))])
    }
}

impl From<Option<Kind>> for Dtypes {
    fn from(kind: Option<Kind>) -> Dtypes {
        kind.map(Dtypes::from).unwrap_or_default()
    }
}

impl<S: Into<String>, const N: usize> From<[(S, Option<Kind>); N]> for Dtypes {
    fn from(rules: [(S, Option<Kind>); N]) -> Dtypes {
        rules.into_iter().collect()
    }
}

impl<S: Into<String>> FromIterator<(S, Option<Kind>)> for Dtypes {
    fn from_iter<I: IntoIterator<Item = (S, Option<Kind>)>>(rules: I) -> Dtypes {
        Dtypes { rules: rules.into_iter().map(|(pattern, kind)| (pattern.into(), kind)).collect() }
    }
}

/// Returns names and patterns, and the number of the dtype of each.
pub(super) fn numbers(dtypes: impl Into<Dtypes>) -> Result<(Vec<String>, Vec<i64>)> {
    dtypes.into().rules.into_iter().map(|(pattern, kind)| Ok((pattern, i64::from(scalar_type(kind)?)))).collect()
}

/// Returns the value of `c10::ScalarType`, which tch does not expose; -1 for `None`.
fn scalar_type(kind: Option<Kind>) -> Result<i8> {
    let Some(kind) = kind else { return Ok(-1) };
    let dtype = match kind {
        Kind::Half => Dtype::F16,
        Kind::BFloat16 => Dtype::BF16,
        Kind::Float => Dtype::F32,
        Kind::Double => Dtype::F64,
        Kind::Float8e5m2 => Dtype::F8E5M2,
        Kind::Float8e4m3fn => Dtype::F8E4M3,
        Kind::Float8e5m2fnuz => Dtype::F8E5M2Fnuz,
        Kind::Float8e4m3fnuz => Dtype::F8E4M3Fnuz,
        _ => {
            let message = format!("dtype is {kind:?}, but must be a floating-point dtype of 8 bits or more");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
    };
    dtype.scalar_type().ok_or_else(|| Error::new(ErrorKind::Internal, "PyTorch has no such dtype"))
}
