//! Outputs of recipes, and plans of their loads.

use super::calls::{encode, parse};
use super::dtype_rules::{self, scalar_type};
use super::ffi;
use super::guard::{guard, watched};
use super::selection::{Reads, Selection, signed};
use crate::checkpoint;
use crate::checkpoint::region::{IndexRange, TensorRegion};
use crate::checkpoint::selection::{self, IndexRegions};
use crate::dtype::Dtype;
use crate::error::{Error, Kind, Result};
use crate::load;
use crate::load::views::Mappings;
use crate::num::to_u64;
use crate::options::Options;
use crate::os::mutex::Mutex;
use crate::recipe::layout::{Elements, Layout, Memory, numel};
use crate::recipe::matching::Recipe;
use crate::recipe::numbers::Parts;
use crate::recipe::output::Output;
use crate::recipe::pieces::{NumbersPiece, Piece, Plan, Quantization};
use crate::recipe::quantize;
use crate::recipe::recorded::Recorded;
use crate::recipe::requests::Request;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Most numbers that a step of a conversion to codes holds: 16 MiB of F32, of which a step takes far longer than its plan.
const STEP_NUMBERS_MAX: u64 = 4 << 20;

/// Requested outputs of a recipe.
pub(super) struct RecipeOutputs {
    files: Arc<checkpoint::Checkpoint>,
    mappings: Arc<Mappings>,
    reads: Reads,
    recipe: Arc<Recipe>,
    requests: Vec<Request>,
    /// Number of tensors in memory that the caller passes beside the outputs.
    held: usize,
}

/// Recipe of the last load. A stream, or a program that takes outputs one by one, loads with the same rules each time,
/// and to find the tensors that they name takes longer than a small load.
#[derive(Default)]
pub(super) struct LastRecipe(Mutex<Option<(Vec<String>, Arc<Recipe>)>>);

impl LastRecipe {
    /// Returns the recipe with these rules.
    pub(super) fn or_parse(&self, files: &checkpoint::Checkpoint, rules: &[String]) -> Result<Arc<Recipe>> {
        if let Some((last, recipe)) = &*self.0.lock()
            && last == rules
        {
            return Ok(Arc::clone(recipe));
        }
        let recipe = Arc::new(Recipe::new(files, rules)?);
        *self.0.lock() = Some((rules.to_vec(), Arc::clone(&recipe)));
        Ok(recipe)
    }

    /// Describes the outputs of rules in JSON.
    pub(super) fn describe(&self, files: &checkpoint::Checkpoint, request: &Rules) -> Result<String> {
        let recipe = self.or_parse(files, &request.rules)?;
        let entries: Vec<&str> = files.entries().map(|(_, entry)| entry.name).collect();
        let names =
            |positions: &[usize]| positions.iter().filter_map(|&position| entries.get(position).copied()).collect();
        let unused: Vec<&str> = names(recipe.unused());
        if request.strict
            && let Some((first, rest)) = unused.split_first()
        {
            let others = if rest.is_empty() { String::new() } else { format!(", nor {} others", rest.len()) };
            let message = format!("no rule reads the tensor{others}; add the rule `else {{*n}} = {{*n}}` to keep them");
            return Err(files.locate(0, Error::new(Kind::InvalidArgument, message).tensor(*first)));
        }
        let mut outputs = Vec::with_capacity(recipe.outputs().len());
        for Output { name, dtype, view, sources, .. } in recipe.outputs() {
            outputs.push((&**name, dtype.name(), view.shape(), names(sources)));
        }
        encode(&Outputs { outputs, unused })
    }
}

/// Request for the outputs of rules.
#[derive(Deserialize)]
pub(super) struct Rules {
    rules: Vec<String>,
    /// Whether tensors that no rule reads are an error.
    strict: bool,
}

/// Outputs of rules, and the tensors that no rule reads.
#[derive(Serialize)]
struct Outputs<'a> {
    /// Name, dtype and shape, and the names of the tensors that the output is made of.
    outputs: Vec<(&'a str, &'static str, &'a [u64], Vec<&'a str>)>,
    unused: Vec<&'a str>,
}

impl RecipeOutputs {
    /// Finds outputs of a recipe, or index regions of them.
    pub(super) fn new(
        files: &Arc<checkpoint::Checkpoint>,
        mappings: &Arc<Mappings>,
        reads: Reads,
        recipe: Arc<Recipe>,
        names: &[String],
        regions: Option<IndexRegions<'_>>,
    ) -> Result<RecipeOutputs> {
        let requests = recipe.requests(names, regions)?;
        let (files, mappings) = (Arc::clone(files), Arc::clone(mappings));
        Ok(RecipeOutputs { files, mappings, reads, recipe, requests, held: 0 })
    }

    /// Returns recorded views as outputs. They are in JSON, as [`Recorded`], and show tensors of the checkpoint and of memory.
    pub(super) fn recorded(
        files: &Arc<checkpoint::Checkpoint>,
        mappings: &Arc<Mappings>,
        reads: Reads,
        views: &str,
        held: usize,
    ) -> Result<RecipeOutputs> {
        let recipe = Recipe::recorded(files, &parse::<Recorded>(views)?)?;
        let (requests, recipe) = (recipe.all_requests(), Arc::new(recipe));
        let (files, mappings) = (Arc::clone(files), Arc::clone(mappings));
        Ok(RecipeOutputs { files, mappings, reads, recipe, requests, held })
    }

    /// Returns what C++ allocates for the outputs. The stored dtype is the dtype of the recipe. Rules for dtypes set the
    /// dtypes of outputs whose rules state none.
    pub(super) fn specs(&mut self, rules: &[ffi::DtypeRule]) -> Result<Vec<ffi::Spec>> {
        let rules = dtype_rules::rules(rules);
        guard(|| {
            let set = self.recipe.set_dtypes(&mut self.requests, &rules);
            set.map_err(|error| self.files.locate(0, error))?;
            let spec = |request: &Request| {
                let output = self.recipe.outputs().get(request.output);
                let output = output.ok_or_else(|| Error::new(Kind::Internal, "no such output"))?;
                let spec = temporary_spec(&output.name, output.dtype, request.view.shape())?;
                Ok(ffi::Spec { target_type: scalar_type(request.dtype)?, ..spec })
            };
            self.requests.iter().map(spec).collect()
        })
    }

    /// Plans loads into existing tensors of these dtypes and strides, or into new ones if there are none. Later plans only
    /// convert numbers to codes and scales.
    pub(super) fn plan(&mut self, targets: &[ffi::RecipeTarget]) -> Result<Vec<ffi::RecipePlan>> {
        let is_new = targets.is_empty();
        watched(|check| {
            for (request, target) in self.requests.iter_mut().zip(targets) {
                let unknown = || Error::new(Kind::Internal, "an output has an unknown dtype");
                request.dtype = Dtype::from_scalar_type(target.scalar_type).ok_or_else(unknown)?;
                let stride = |&stride: &i64| u64::try_from(stride).unwrap_or(0);
                let sizes = request.view.shape().to_vec();
                request.layout = Layout { offset: 0, sizes, strides: target.strides.iter().map(stride).collect() };
            }
            let plan = Plan::new(&self.recipe, &self.requests, check)?;
            // Computed outputs take several loads, of which none sees all bytes of a file.
            if !plan.numbers.is_empty() || self.requests.iter().any(|request| request.view.base.is_quantized()) {
                load::check::check_whole_files(&self.files, &Options::from_env()?)?;
            }
            let none = vec![None; self.requests.len()];
            let whole = if is_new { plan.whole_pieces(&self.requests) } else { none.clone() };
            // A digest may cover whole tensors only.
            let is_verified = self.files.coverage(&[])?.is_some();
            let numbers_max = if is_verified { u64::MAX } else { STEP_NUMBERS_MAX };
            let mut plans = vec![self.part(&plan, &whole)?];
            for step in quantize::steps(&self.requests, numbers_max, check)? {
                plans.push(self.part(&step, &none)?);
            }
            Ok(plans)
        })
    }

    /// Returns a plan for C++. Pieces of `whole` alone fill outputs.
    fn part(&self, plan: &Plan, whole: &[Option<usize>]) -> Result<ffi::RecipePlan> {
        let mut is_whole = vec![false; plan.pieces.len()];
        for index in whole.iter().flatten() {
            is_whole.iter_mut().skip(*index).take(1).for_each(|is_whole| *is_whole = true);
        }
        let (codes, scales, numbers) = self.numbers(plan)?;
        let whole_pieces = whole.iter().flatten().filter_map(|&index| plan.pieces.get(index));
        let parts = plan.pieces.iter().zip(&is_whole).filter(|(_, is_whole)| !**is_whole).map(|(piece, _)| piece);
        let parts: Vec<&Piece> = parts.collect();
        let elements = |elements: &Elements| self.elements(elements);
        let copy = |copy: &crate::recipe::pieces::Copy| {
            Ok(ffi::ElementsCopy { source: self.elements(&copy.source)?, target: self.elements(&copy.target)? })
        };
        let temporaries = plan.temporaries.iter().map(|temporary| {
            let spec = temporary_spec("a temporary tensor", temporary.dtype, &temporary.shape)?;
            Ok(ffi::TemporaryTensor { spec, output: temporary.output, is_result: temporary.is_result })
        });
        Ok(ffi::RecipePlan {
            whole_outputs: whole.iter().enumerate().filter_map(|(output, piece)| piece.map(|_| output)).collect(),
            whole: self.selection(whole_pieces)?,
            targets: parts.iter().map(|piece| elements(&piece.target)).collect::<Result<_>>()?,
            parts: self.selection(parts.iter().copied())?,
            codes,
            scales,
            numbers,
            temporaries: temporaries.collect::<Result<_>>()?,
            quantizations: plan.quantizations.iter().map(|part| self.codes(part)).collect(),
            copies: plan.copies.iter().map(copy).collect::<Result<_>>()?,
        })
    }

    fn selection<'a>(&self, pieces: impl Iterator<Item = &'a Piece>) -> Result<Box<Selection>> {
        self.select(pieces.map(|piece| (piece.position, &piece.region)))
    }

    /// Selects index regions of tensors at positions of the checkpoint.
    fn select<'a>(&self, regions: impl Iterator<Item = (usize, &'a Vec<IndexRange>)>) -> Result<Box<Selection>> {
        let region = |(position, ranges): (usize, &Vec<IndexRange>)| {
            let entry = self.files.entry(position);
            let (source, entry) = entry.ok_or_else(|| Error::new(Kind::Internal, "no such tensor"))?;
            let region = TensorRegion::indexed(source, entry, ranges);
            region.map_err(|error| self.files.locate(source, error))
        };
        let regions: Vec<TensorRegion> = regions.map(region).collect::<Result<_>>()?;
        let selection = selection::Selection::from_regions(&self.files, regions.into());
        Ok(Box::new(Selection::new(selection, Arc::clone(&self.mappings), self.reads.clone())))
    }

    /// Returns the regions of codes, those of scales, and the parts that are made of them.
    fn numbers(&self, plan: &Plan) -> Result<(Box<Selection>, Box<Selection>, Vec<ffi::NumbersPart>)> {
        let (mut codes, mut scales, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for NumbersPiece {
            numbers,
            parts: Parts { codes: code_region, scales: scale_region, scales_shape, global_scale, begin },
            target,
        } in &plan.numbers
        {
            codes.push((numbers.codes.position, code_region));
            let scale = scales.len();
            scales.push((numbers.scales.position, scale_region));
            let global_index = numbers.global_scale.as_ref().map(|stored| {
                scales.push((stored.position, global_scale));
                scales.len() - 1
            });
            parts.push(ffi::NumbersPart {
                scheme: numbers.scheme.name().into(),
                scales: scale,
                scales_shape: signed(scales_shape)?,
                global_scale: global_index
                    .map_or(Ok(-1), |index| signed_pair([to_u64(index), 0]).map(|[index, _]| index))?,
                block: signed_pair(numbers.block)?,
                begin: signed_pair(*begin)?,
                target: self.elements(target)?,
            });
        }
        Ok((self.select(codes.into_iter())?, self.select(scales.into_iter())?, parts))
    }

    fn codes(&self, part: &Quantization) -> ffi::CodesPart {
        ffi::CodesPart {
            scheme: part.quantized.codes.name().into(),
            block: part.quantized.block,
            input: self.first_temporary() + part.input,
            codes: self.first_temporary() + part.codes,
            copies_before: part.copies_before,
        }
    }

    fn first_temporary(&self) -> usize {
        self.requests.len() + self.held
    }

    fn elements(&self, elements: &Elements) -> Result<ffi::StridedElements> {
        let tensor = match elements.memory {
            Memory::Output(output) => output,
            Memory::Held(held) => self.requests.len() + held,
            Memory::Temporary(temporary) => self.first_temporary() + temporary,
        };
        let Layout { offset, sizes, strides } = &elements.layout;
        let offset = signed(&[*offset])?.into_iter().next().unwrap_or(0);
        Ok(ffi::StridedElements { tensor, offset, sizes: signed(sizes)?, strides: signed(strides)? })
    }
}

fn signed_pair(pair: [u64; 2]) -> Result<[i64; 2]> {
    let too_large = || Error::new(Kind::Internal, "a number exceeds 63 bits");
    <[i64; 2]>::try_from(signed(&pair)?).map_err(|_| too_large())
}

/// Returns what C++ allocates for a tensor that is not stored. It counts as one with data, so that it is not set to zero.
fn temporary_spec(name: &str, dtype: Dtype, shape: &[u64]) -> Result<ffi::Spec> {
    let scalar_type = scalar_type(dtype)?;
    let bytes = numel(shape).saturating_mul(dtype.item_bytes());
    let spec = ffi::Spec {
        name: name.into(),
        scalar_type,
        target_type: scalar_type,
        shape: signed(shape)?,
        bytes,
        is_small: false,
    };
    Ok(spec)
}
