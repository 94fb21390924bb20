//! Open files, local or remote, whose bytes are read as they are.

use super::ffi;
use super::guard::{guard_with_log, watched};
use crate::error::{Error, Kind, Result};
use crate::os::sigint::Watch;
use crate::source;
use crate::source::files::place_of;
use std::path::Path;

/// Open file.
pub(super) struct Source(source::Source);

pub(super) fn open_source(path: &str) -> Result<ffi::OpenedFile> {
    guard_with_log(|| {
        let place = place_of(Path::new(path))?;
        let watch = Watch::begin();
        let source = source::Source::open(&place, &|| watch.check())?;
        Ok(ffi::OpenedFile { bytes: source.length(), source: Box::new(Source(source)) })
    })
}

impl Source {
    pub(super) fn read(&self, begin: u64, into: &mut [u8]) -> Result<()> {
        watched(|check| {
            let length = self.0.length();
            if begin.saturating_add(crate::num::to_u64(into.len())) > length {
                let message = format!("the file has {length} bytes; a range must end there or before");
                return Err(Error::new(Kind::InvalidArgument, message).at(self.0.path()).offset(begin));
            }
            self.0.read(begin, into, check)
        })
    }
}
