//! Recognizes other formats, and answers of servers that were saved in place of a file, by the first bytes of a file.

use crate::error::Error;
use crate::source::directory::UNFINISHED;
use std::path::Path;

/// Number of first bytes that [`recognize`] looks at.
pub(super) const FIRST_BYTES: u64 = 512;

const HUB: &str = "an answer of the Hugging Face Hub, which denies access";
const LOG_IN: &str =
    "accept the terms on the page of the model, log in with `hf auth login`, and download the file again";
const PYTORCH: &str = "a PyTorch file";
const CONVERT: &str = "convert it with `fst convert FILE model.safetensors`";
const PICKLE: &str = "a pickle";
const UNPICKLE: &str = "if you trust its source, load it with Python, and write the tensors with fst.save_file";
const UNPACK: &str = "unpack it";
const DOWNLOAD: &str = "copy or download the file again";
const NUMPY: &str = "read it with numpy.load, and write it with fst.numpy.save_file";

/// Bytes by which a format is recognized, what the file is, and what to do.
type Format = (&'static [u8], &'static str, &'static str);

/// Formats by the first bytes of a file, in any case and without white space. The first match counts.
const FORMATS: [Format; 22] = [
    (b"version https://git-lfs", "a Git LFS pointer", "run `git lfs pull` in its repository"),
    (b"<!doctype html", "an HTML page", "download the file itself, on the Hugging Face Hub from /resolve/, not /blob/"),
    (b"<html", "an HTML page", "open it: a server may ask to log in; then download the file again"),
    (b"<", "an XML text", "read it: it may be the error message of an object store; then download the file again"),
    (b"access to ", HUB, LOG_IN),
    (b"invalid username or password", HUB, LOG_IN),
    (
        b"{",
        "a JSON text",
        "read it: it may be an error message, or an index, whose name must end in .safetensors.index.json",
    ),
    (b"# xet version", "a Git Xet pointer", "install git-xet, and check the file out again"),
    (b"GGUF", "a GGUF file", "download the safetensors files of the model"),
    (b"\0\x05\x16\x07", "a file with attributes of macOS", "load the file whose name lacks the `._`"),
    (GZIP, "a gzip file", "unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file", "unpack it with unzstd"),
    (b"\xfd7zXZ\0", "an xz file", "unpack it with unxz"),
    (b"BZh", "a bzip2 file", "unpack it with bunzip2"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "read it with h5py or Keras, and write the tensors with fst.save_file"),
    (b"\x93NUMPY", "a NumPy array", NUMPY),
    // The number with which files of torch.save began before PyTorch 1.6.
    (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", PYTORCH, CONVERT),
    // A dictionary in protocol 2, and anything in protocols 4 and 5.
    (b"\x80\x02}", PICKLE, UNPICKLE),
    (b"\x80\x04\x95", PICKLE, UNPICKLE),
    (b"\x80\x05\x95", PICKLE, UNPICKLE),
];

/// Bytes at the start of a gzip file.
pub(super) const GZIP: &[u8] = b"\x1f\x8b\x08";

/// Any other text.
const TEXT: Format = (b"", "a text", "read it: it may be the error message of a server; then download the file again");

/// ZIP archives by the end of the name of their first file. The first match counts.
const ARCHIVES: [Format; 3] =
    [(b"/data.pkl", PYTORCH, CONVERT), (b".npy", "a NumPy archive", NUMPY), (b"", "a ZIP archive", "unpack it")];

/// Says what a file is that does not begin as safetensors does, and what to do, or `None` if its first bytes are unknown.
pub(super) fn recognize(first: &[u8]) -> Option<String> {
    let first = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first);
    let text = first.trim_ascii_start();
    let begins = |begin: &[u8]| text.get(..begin.len()).is_some_and(|bytes| bytes.eq_ignore_ascii_case(begin));
    let is_text = !text.is_empty() && first.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
    let name = first_name(first);
    let found = FORMATS.iter().find(|format| begins(format.0));
    let found = found.or_else(|| ARCHIVES.iter().find(|archive| name.is_some_and(|name| name.ends_with(archive.0))));
    let found = found.or_else(|| is_text.then_some(&TEXT)).or_else(|| unnamed(first));
    let (_, what, remedy) = found?;
    Some(format!("this is {what}, not safetensors; {remedy}"))
}

/// Recognizes formats whose first bytes may be of any value.
fn unnamed(first: &[u8]) -> Option<&'static Format> {
    match *first {
        // ONNX: the version, and then the name of the program or of its domain.
        [8, 1..=20, 0x12 | 0x1a | 0x3a | 0x42, ..] => {
            Some(&(b"", "an ONNX model", "export the weights from the program that has the model"))
        }
        // A map whose first key is a text.
        [0x81..=0x8f, 0xa1..=0xbf | 0xd9, ..] | [0xde, _, _, 0xa1..=0xbf | 0xd9, ..] => {
            Some(&(b"", "a MessagePack file", "read it with flax or msgpack, and write the tensors with fst.save_file"))
        }
        _ if first.get(257..262) == Some(b"ustar") => Some(&(b"", "a tar archive", UNPACK)),
        [0, 0, 0, 0, 0, 0, 0, 0, ..] if first.iter().all(|&byte| byte == 0) => {
            Some(&(b"", "a file of zeros, as an interrupted download or copy leaves it", DOWNLOAD))
        }
        _ => None,
    }
}

/// Adds to the error of a malformed file that its download has not ended: its name, or the name of a file beside it,
/// says so.
pub(crate) fn note_download(error: Error, path: &Path) -> Error {
    let name = path.as_os_str().to_string_lossy();
    let beside = || UNFINISHED.iter().find(|ending| Path::new(&format!("{name}{ending}")).exists());
    match (UNFINISHED.iter().find(|ending| name.ends_with(**ending)), beside()) {
        (Some(ending), _) => error.note(&format!("a name that ends in {ending} is that of an unfinished download")),
        (None, Some(ending)) => {
            error.note(&format!("the file beside it that ends in {ending} is of its unfinished download"))
        }
        (None, None) => error,
    }
}

/// Returns the name of the first file in a ZIP archive, which begins with the file's own header.
fn first_name(bytes: &[u8]) -> Option<&[u8]> {
    let header = bytes.strip_prefix(b"PK\x03\x04")?;
    let length = u16::from_le_bytes(header.get(22..24)?.try_into().ok()?);
    header.get(26..26 + usize::from(length))
}
