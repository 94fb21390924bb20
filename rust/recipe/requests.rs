//! Outputs that a load requests of a recipe.

use super::layout::Layout;
use super::matching::Recipe;
use super::output::Output;
use super::view::View;
use crate::checkpoint::dtype_rules::DtypeRules;
use crate::checkpoint::region::IndexRange;
use crate::checkpoint::selection::{IndexRegions, index_range};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};

/// Requested output, and the tensor that it fills.
#[derive(Clone, Debug)]
pub struct Request {
    /// Index of the output in the recipe.
    pub output: usize,
    /// Requested elements.
    pub view: View,
    /// Dtype of the tensor.
    pub dtype: Dtype,
    /// Arrangement of the tensor's elements. New tensors are contiguous.
    pub layout: Layout,
}

impl Recipe {
    /// Returns a request for each output.
    pub fn all_requests(&self) -> Vec<Request> {
        let request = |(index, output): (usize, &Output)| request(index, output, output.view.clone());
        self.outputs().iter().enumerate().map(request).collect()
    }

    /// Returns requests for new tensors with these outputs, in the order of the names, or with index regions of them.
    ///
    /// # Errors
    /// The errors of [`Recipe::find`]; `invalid-argument` if the number of starts, lengths or steps differs from the
    /// number of dimensions of all outputs, or a region does not lie inside its output.
    pub fn requests(&self, names: &[String], regions: Option<IndexRegions<'_>>) -> Result<Vec<Request>> {
        let outputs = names.iter().map(|name| self.find(name)).collect::<Result<Vec<_>>>()?;
        let outputs = outputs.into_iter().filter_map(|index| Some((index, self.outputs().get(index)?)));
        let Some(IndexRegions { starts, lengths, steps }) = regions else {
            return outputs.map(|(index, output)| Ok(request(index, output, output.view.clone()))).collect();
        };
        let mut ranges = starts.iter().zip(lengths).zip(steps);
        let mut requests = Vec::with_capacity(names.len());
        let mut dims = 0;
        for (index, output) in outputs {
            let rank = output.view.shape().len();
            dims += rank;
            let own = ranges.by_ref().take(rank).map(index_range).collect::<Result<Vec<_>>>();
            let view = own.and_then(|own| select(output, &own)).map_err(|error| error.tensor(&*output.name))?;
            requests.push(request(index, output, view));
        }
        if [starts.len(), lengths.len(), steps.len()] != [dims; 3] {
            let message = format!(
                "the {} outputs have {dims} dimensions in all, but there are {} starts, {} lengths and {} steps; give \
                 one of each for every dimension",
                names.len(),
                starts.len(),
                lengths.len(),
                steps.len()
            );
            return Err(Error::new(Kind::InvalidArgument, message));
        }
        Ok(requests)
    }

    /// Sets the dtypes of requests. Rules of the recipe decide before these, and only castable dtypes are cast.
    ///
    /// # Errors
    /// The errors of [`DtypeRules::resolve`].
    pub fn set_dtypes(&self, requests: &mut [Request], rules: &DtypeRules) -> Result<()> {
        let requested = |request: &Request| self.outputs().get(request.output);
        let outputs: Vec<&Output> = requests.iter().filter_map(requested).collect();
        let all = || self.outputs().iter().map(|output| &*output.name);
        let dtypes = rules.resolve(outputs.iter().map(|output| &*output.name), all)?;
        for ((request, output), dtype) in requests.iter_mut().zip(outputs).zip(dtypes) {
            if let Some(dtype) = dtype.filter(|_| output.dtype.is_castable() && !output.is_cast) {
                request.dtype = dtype;
            }
        }
        Ok(())
    }
}

fn request(output: usize, of: &Output, view: View) -> Request {
    Request { output, layout: Layout::contiguous(view.shape()), dtype: of.dtype, view }
}

/// Returns an index region of an output.
fn select(output: &Output, region: &[IndexRange]) -> Result<View> {
    let shape = output.view.shape();
    if region.len() != shape.len() {
        let message =
            format!("{} index ranges for an output with shape {shape:?}; give one for each dimension", region.len());
        return Err(Error::new(Kind::InvalidArgument, message));
    }
    for (dim, (range, &size)) in region.iter().zip(shape).enumerate() {
        if !range.fits(size) {
            let IndexRange { start, length, step } = range;
            let message = format!(
                "{length} indices from {start} with step {step} do not lie inside dimension {dim}, whose size is {size}"
            );
            return Err(Error::new(Kind::InvalidArgument, message));
        }
    }
    Ok(output.view.with(output.view.layout.index(region)))
}
