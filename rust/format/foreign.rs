//! Recognizes other formats, and answers of servers that were saved in place of a file, by the first bytes of a file.

/// Number of first bytes that [`recognize`] looks at.
pub(super) const FIRST_BYTES: u64 = 512;

const HUB: &str = "an answer of the Hugging Face Hub, which denies access";
const LOG_IN: &str =
    "accept the terms on the page of the model, log in with `hf auth login`, and download the file again";
const PYTORCH: &str = "a PyTorch file";
const CONVERT: &str = "convert it with `fst convert FILE model.safetensors`";
const PICKLE: &str = "a pickle";
const UNPICKLE: &str = "if you trust its source, load it with Python, and write the tensors with fst.save_file";
const NUMPY: &str = "read it with numpy.load, and write it with fst.numpy.save_file";

/// Bytes by which a format is recognized, what the file is, and what to do.
type Format = (&'static [u8], &'static str, &'static str);

/// Formats by the first bytes of a file, in any case and without white space. The first match counts.
const FORMATS: [Format; 13] = [
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
    (b"GGUF", "a GGUF file", "download the safetensors files of the model"),
    (b"\x93NUMPY", "a NumPy array", NUMPY),
    // The number with which files of torch.save began before PyTorch 1.6.
    (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", PYTORCH, CONVERT),
    // A dictionary in protocol 2, and anything in protocols 4 and 5.
    (b"\x80\x02}", PICKLE, UNPICKLE),
    (b"\x80\x04\x95", PICKLE, UNPICKLE),
    (b"\x80\x05\x95", PICKLE, UNPICKLE),
];

/// Any other text.
const TEXT: Format = (b"", "a text", "read it: it may be the error message of a server; then download the file again");

/// ZIP archives by the end of the name of their first file. The first match counts.
const ARCHIVES: [Format; 3] =
    [(b"/data.pkl", PYTORCH, CONVERT), (b".npy", "a NumPy archive", NUMPY), (b"", "a ZIP archive", "unpack it")];

/// Says what a file is that does not begin as safetensors does, and what to do, or `None` if its first bytes are unknown.
pub(super) fn recognize(first: &[u8]) -> Option<String> {
    let text = first.trim_ascii_start();
    let begins = |begin: &[u8]| text.get(..begin.len()).is_some_and(|bytes| bytes.eq_ignore_ascii_case(begin));
    let is_text = !text.is_empty() && first.iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace());
    let name = first_name(first);
    let found = FORMATS.iter().find(|format| begins(format.0));
    let found = found.or_else(|| ARCHIVES.iter().find(|archive| name.is_some_and(|name| name.ends_with(archive.0))));
    let (_, what, remedy) = found.or_else(|| is_text.then_some(&TEXT))?;
    Some(format!("this is {what}, not safetensors; {remedy}"))
}

/// Returns the name of the first file in a ZIP archive, which begins with the file's own header.
fn first_name(bytes: &[u8]) -> Option<&[u8]> {
    let header = bytes.strip_prefix(b"PK\x03\x04")?;
    let length = u16::from_le_bytes(header.get(22..24)?.try_into().ok()?);
    header.get(26..26 + usize::from(length))
}
