//! `larder open`: the process that opens files for a confined server.

use std::os::fd::AsFd;
use std::process::ExitCode;

use anyhow::Context;
use larder_vm::opener::{file_of_service, serve};

use crate::cli::OpenArguments;
use crate::signals;

pub(crate) fn run(arguments: &OpenArguments) -> anyhow::Result<ExitCode> {
    // The signals are ignored: they also reach the server, which may need a file until it has ended. This process
    // ends with it.
    let _signals = signals::block()?;
    let channel = std::io::stdin().as_fd().try_clone_to_owned()?;
    let file = match &arguments.file {
        Some(file) => file.clone(),
        None => file_of_service(&channel).context("no files are opened for the process that has connected")?,
    };
    serve(&channel, &file).with_context(|| format!("opening files for the server of {}", file.display()))?;
    Ok(ExitCode::SUCCESS)
}
