//! The addresses that C++ gives, as destinations of a plan.

use super::ffi;
use crate::checkpoint::region::Wanted;
use crate::convert::cast::Cast;
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::load::transfer::Batch;
use crate::plan::Destination;

pub(super) fn cast(from: i8, to: i8) -> Option<Cast> {
    Cast::new(Dtype::from_scalar_type(from)?, Dtype::from_scalar_type(to)?)
}

pub(super) fn destinations(wanted: &[Wanted], pieces: &[ffi::Piece]) -> Result<Vec<Destination>> {
    let destination = |piece: &ffi::Piece| {
        let wrong = || Error::new(Kind::Internal, "a piece of no wanted tensor or dtype");
        let from = wanted.get(piece.tensor).ok_or_else(wrong)?.dtype;
        let to = Dtype::from_scalar_type(piece.scalar_type).ok_or_else(wrong)?;
        let cast = if from == to { None } else { Some(Cast::new(from, to).ok_or_else(wrong)?) };
        let ffi::Piece { tensor, begin, end, address, .. } = *piece;
        Ok(Destination { wanted: tensor, begin, end, address, cast })
    };
    pieces.iter().map(destination).collect()
}

pub(super) fn scratch_bytes(batch: &Batch) -> Result<u64> {
    u64::try_from(batch.scratch_bytes()).map_err(|_| Error::new(Kind::Internal, "more scratch than there can be"))
}
