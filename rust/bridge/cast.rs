//! Conversions of tensors to other dtypes.

use super::ffi;
use super::guard::guard_with_log;
use crate::cast::batch;
use crate::device::cuda;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::os::sigint::Watch;

/// Returns whether loads with `dtype=` cast tensors of this scalar type.
pub(super) fn is_castable(scalar_type: i8) -> bool {
    Dtype::from_scalar_type(scalar_type).is_some_and(Dtype::is_castable)
}

pub(super) fn can_convert(from: i8, to: i8) -> bool {
    let (from, to) = (Dtype::from_scalar_type(from), Dtype::from_scalar_type(to));
    from.zip(to).is_some_and(|(from, to)| batch::is_possible(from, to))
}

/// Converts elements on the GPU with this ordinal, or on the host if it is negative. Returns false if the GPU has no
/// kernels.
///
/// # Safety
/// The caller meets the conditions of [`batch::run`] on the host. Sources and targets of a GPU are its memory, and no
/// other stream uses them before this conversion is complete.
pub(super) unsafe fn convert(
    conversions: &[ffi::Conversion],
    ordinal: i32,
    stream: u64,
    threads: usize,
) -> Result<bool> {
    guard_with_log(|| {
        let conversions: Vec<batch::Conversion> = conversions.iter().map(conversion).collect::<Result<_>>()?;
        match ordinal {
            // SAFETY: the caller's promise is the same.
            ..0 => unsafe { batch::run(&conversions, threads) }.map(|()| true),
            _ => cuda::convert::run(&conversions, ordinal, stream),
        }
    })
}

/// # Safety
/// The caller meets the conditions of [`cuda::wait_for_event`].
pub(super) unsafe fn wait_for_event(event: usize, ordinal: i32) -> Result<()> {
    guard_with_log(|| {
        let watch = Watch::begin();
        // SAFETY: the caller's promise is the same.
        unsafe { cuda::wait_for_event(event, ordinal, &|| watch.check()) }
    })
}

/// Returns why a GPU that was used has no device kernels. Empty if it has some.
pub(super) fn missing_kernels(ordinal: i32) -> String {
    cuda::kernels::missing(ordinal).unwrap_or_default()
}

fn conversion(conversion: &ffi::Conversion) -> Result<batch::Conversion> {
    let ffi::Conversion { source, target, elements, from, to, positions, target_elements } = *conversion;
    let dtype = |value: i8| {
        let unknown = || Error::new(Kind::Internal, format!("no dtype has the scalar type {value}"));
        Dtype::from_scalar_type(value).ok_or_else(unknown)
    };
    let positions = (positions != 0).then_some(positions);
    Ok(batch::Conversion { source, target, elements, from: dtype(from)?, to: dtype(to)?, positions, target_elements })
}
