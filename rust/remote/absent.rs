//! Replacement of `rust/remote.rs` in a build without the feature `remote`. URLs are parsed, and opening one is an error.

#![allow(missing_docs, reason = "the documentation is in rust/remote.rs")]

use crate::error::{Error, Kind, Result};
use find::location::Location;
use find::name::Name;

fn absent(location: &Location) -> Error {
    let message = "this build of fst has no remote sources: enable the feature remote";
    Error::new(Kind::InvalidArgument, message).at(location.to_string())
}

impl Location {
    pub fn child(&self, _: &Name) -> Result<Location> {
        Err(absent(self))
    }

    pub fn sibling(&self, _: &Name) -> Result<Location> {
        Err(absent(self))
    }
}

/// Defines functions that refuse a URL.
macro_rules! refused {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        $(pub fn $name(location: &$crate::remote::find::location::Location, $(_: $argument),*) -> $crate::Result<$result> {
            Err($crate::remote::absent(location))
        })*
    };
}

/// Defines the methods of a type without values.
macro_rules! never {
    ($type:ty: $($name:ident $(<$generic:tt>)? ($($argument:ty),*) -> $result:ty;)*) => {
        impl $type {
            $(pub fn $name $(<$generic>)? (&self, $(_: $argument),*) -> $result {
                match self.0 {}
            })*
        }
    };
}

pub mod find {
    #[allow(dead_code, reason = "some parts of locations are for requests only")]
    pub mod location;
    #[allow(dead_code, reason = "some parts of names are for requests only")]
    pub mod name;
    #[allow(dead_code, reason = "some parts of repositories are for requests only")]
    mod repository;
    pub mod version;

    use super::transfer::object::Object;
    use crate::error::Result;
    use crate::os::retry::Check;
    use location::Location;
    use name::Name;
    use std::path::PathBuf;

    pub enum Found {
        Object(Location),
        Opened(Object),
        Prefix(Location, Vec<Name>),
        Local(PathBuf),
    }

    refused! {
        find(&[&str], Check<'_>) -> Found;
    }

    pub fn is_same(one: &Location, other: &Location) -> bool {
        one == other
    }

    pub fn read_all(object: &Object, _: u64, check: Check<'_>) -> Result<Vec<u8>> {
        object.first_bytes(check)
    }
}

pub mod transfer {
    pub mod limits;

    pub mod object {
        use crate::error::Result;
        use crate::os::local_file::LocalFile;
        use crate::os::retry::Check;
        use crate::remote::find::location::Location;
        use crate::remote::find::version::Version;
        use std::convert::Infallible;
        use std::fs::File;
        use std::path::Path;
        use std::sync::Arc;

        #[derive(Debug)]
        pub struct Object(Infallible);

        refused! {
            open(u64, Check<'_>) -> Object;
            open_known(u64, Version, Vec<u8>) -> Object;
        }

        never! {
            Object:
            location() -> &Location;
            path() -> &Path;
            length() -> u64;
            requests_at_start() -> usize;
            version() -> &Version;
            hub_sha256() -> Option<&str>;
            first_bytes(Check<'_>) -> Result<Vec<u8>>;
            copy() -> Option<&Arc<LocalFile>>;
            copy_file() -> Option<&File>;
            read<'a>(impl IntoIterator<Item = (u64, &'a mut [u8])>, Check<'_>) -> Result<()>;
            read_joined<'a>(impl IntoIterator<Item = (u64, &'a mut [u8])>, u64, Check<'_>) -> Result<()>;
        }
    }

    pub mod upload {
        use crate::error::{Error, Result};
        use crate::os::retry::Check;
        use std::convert::Infallible;
        use std::path::Path;

        #[derive(Debug)]
        pub struct Upload(Infallible);

        refused! {
            names_beside(Check<'_>) -> Vec<String>;
            remove(Check<'_>) -> ();
        }

        impl Upload {
            refused! {
                open() -> Upload;
                begin_shared(u64, Check<'_>) -> String;
                join(String) -> Upload;
                finish_shared(String, Vec<(usize, String)>, Check<'_>) -> ();
                abort_shared(String) -> ();
            }
        }

        never! {
            Upload:
            path() -> &Path;
            sent_parts() -> Vec<(usize, String)>;
            begin(Option<u64>, Check<'_>) -> Result<()>;
            put<M>(usize, u64, M, usize, Check<'_>) -> Result<Option<M>>;
            shift(u64, u64, u64, Check<'_>) -> Result<()>;
            finish(Check<'_>) -> Result<()>;
            abandon(Error) -> Error;
        }
    }
}
