//! A token in a file that is replaced from time to time, as the kubelet does.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use http::HeaderValue;
use tokio::time::Instant;
use tracing::warn;

use super::{Credential, CredentialError, bearer};
use crate::causes::with_causes;

/// How long a token is used before the file is read again: client-go's minute without its ten
/// seconds of leeway.
const PERIOD: Duration = Duration::from_secs(50);

/// Reads the token again by a monotonic clock, and after the server did not accept it.
pub(in crate::watch::api) struct TokenFile {
    path: PathBuf,
    state: Mutex<State>,
}

struct State {
    token: HeaderValue,
    /// When the file must be read again.
    expires: Instant,
    is_failing: bool,
}

impl TokenFile {
    /// Reads the file. If it cannot be read, the token is `fallback`.
    pub(super) fn new(path: &str, fallback: Option<&str>) -> Result<Self, CredentialError> {
        let path = PathBuf::from(path);
        let token = match (read(&path), fallback) {
            (Err(_), Some(fallback)) => bearer(fallback)?,
            (token, _) => token?,
        };
        let state = State { token, expires: Instant::now() + PERIOD, is_failing: false };
        Ok(Self { path, state: Mutex::new(state) })
    }

    /// Returns the token. If the file cannot be read, returns the last token.
    pub(super) fn current(&self) -> Credential {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if now >= state.expires {
            state.expires = now + PERIOD;
            match read(&self.path) {
                Ok(token) => {
                    state.token = token;
                    state.is_failing = false;
                }
                Err(error) if !state.is_failing => {
                    state.is_failing = true;
                    warn!("{}; shunt uses the last token", with_causes(&error));
                }
                Err(_) => {}
            }
        }
        Credential { authorization: Some(state.token.clone()), ..Credential::default() }
    }

    /// Reads the file again for the next request.
    pub(super) fn reject(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).expires = Instant::now();
    }
}

fn read(path: &Path) -> Result<HeaderValue, CredentialError> {
    let text = fs::read_to_string(path)
        .map_err(|source| CredentialError::TokenFile { path: path.to_owned(), source })?;
    let token = text.trim();
    if token.is_empty() {
        return Err(CredentialError::EmptyTokenFile(path.to_owned()));
    }
    bearer(token)
}

#[cfg(test)]
mod tests {
    use tempfile::NamedTempFile;

    use super::*;

    fn token(file: &TokenFile) -> String {
        let authorization = file.current().authorization.expect("a token");
        authorization.to_str().expect("text").to_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn the_file_is_trimmed_and_read_again_after_a_while_or_a_rejection() {
        let path = NamedTempFile::new().expect("a file").into_temp_path();
        fs::write(&path, " one\n").expect("written");
        let file = TokenFile::new(&path.to_string_lossy(), None).expect("a token");
        assert_eq!(token(&file), "Bearer one");
        fs::write(&path, "two\n").expect("written");
        assert_eq!(token(&file), "Bearer one");
        tokio::time::advance(PERIOD).await;
        assert_eq!(token(&file), "Bearer two");
        fs::write(&path, "three").expect("written");
        file.reject();
        assert_eq!(token(&file), "Bearer three");
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_token_stays_while_the_file_is_missing_or_empty() {
        let path = NamedTempFile::new().expect("a file").into_temp_path();
        fs::write(&path, "one").expect("written");
        let file = TokenFile::new(&path.to_string_lossy(), None).expect("a token");
        fs::write(&path, "\n").expect("written");
        tokio::time::advance(PERIOD).await;
        assert_eq!(token(&file), "Bearer one");
        fs::remove_file(&path).expect("removed");
        tokio::time::advance(PERIOD).await;
        assert_eq!(token(&file), "Bearer one");
        let fallback = TokenFile::new(&path.to_string_lossy(), Some("inline")).expect("a token");
        assert_eq!(token(&fallback), "Bearer inline");
    }
}
