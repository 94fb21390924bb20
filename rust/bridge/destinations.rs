//! Decodes addresses from C++ into destinations of a plan.

use super::ffi;
use crate::cast::elements::Cast;
use crate::checkpoint::region::TensorRegion;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::plan::Destination;

pub(super) fn cast(from: i8, to: i8) -> Option<Cast> {
    Cast::new(Dtype::from_scalar_type(from)?, Dtype::from_scalar_type(to)?)
}

pub(super) fn decode_destinations(
    regions: &[TensorRegion],
    destinations: &[ffi::Destination],
) -> Result<Vec<Destination>> {
    let destination = |destination: &ffi::Destination| {
        let invalid = || Error::new(Kind::Internal, "a destination has an unknown tensor or dtype");
        let from = regions.get(destination.tensor).ok_or_else(invalid)?.dtype;
        let to = Dtype::from_scalar_type(destination.scalar_type).ok_or_else(invalid)?;
        let cast = if from == to { None } else { Some(Cast::new(from, to).ok_or_else(invalid)?) };
        let ffi::Destination { tensor, begin, end, address, .. } = *destination;
        Ok(Destination { tensor, begin, end, address, cast })
    };
    destinations.iter().map(destination).collect()
}
