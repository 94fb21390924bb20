//! Headers of single tensors, which only `.tensors` files have.

use super::{Checkpoint, REMOTE_HEADER_THREADS};
use crate::error::{Error, Kind, Result};
use crate::format::tensors::tensor_header::{self, TensorHeader};
use crate::num::to_usize;
use crate::os::sigint::Watch;
use crate::os::threads;
use crate::source::Source;

impl Checkpoint {
    /// Reads and checks the headers of tensors of `.tensors` files, in the order of `names`. Those of objects are requested
    /// many at once.
    ///
    /// # Errors
    /// Those of [`Checkpoint::find`] and of reading; `invalid-argument` for a tensor of a safetensors file; `malformed` if a
    /// header does not agree with the metadata of its file.
    pub fn tensor_headers(&self, names: &[String]) -> Result<Vec<TensorHeader>> {
        let watch = Watch::begin();
        let is_remote = self.sources().any(Source::is_remote);
        let missing = || Error::new(Kind::Internal, "no such name");
        threads::map(if is_remote { REMOTE_HEADER_THREADS } else { 1 }, names.len(), |index| {
            self.tensor_header(names.get(index).ok_or_else(missing)?, &watch)
        })
    }

    fn tensor_header(&self, name: &str, watch: &Watch) -> Result<TensorHeader> {
        let (file, entry) = self.find(name)?;
        let source = self.source(file)?;
        let read = || {
            let tensors_entry = entry.tensors.ok_or_else(|| {
                let message = "only tensors of tensorizer's format have headers of their own";
                Error::new(Kind::InvalidArgument, message).tensor(name)
            })?;
            let range = tensor_header::range(entry, tensors_entry)?;
            let mut bytes = vec![0; to_usize(range.end.saturating_sub(range.start))];
            source.read(range.start, &mut bytes, &|| watch.check())?;
            tensor_header::parse(&bytes, entry, tensors_entry)
        };
        read().map_err(|error| error.at(source.path()))
    }
}
