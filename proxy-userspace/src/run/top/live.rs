//! The live table of `shunt top`: the feature `live-top`.

use std::{io, process::ExitCode, thread, time::Duration};

use anyhow::Context as _;
use proxy_userspace::{
    causes::with_causes,
    inspect::ServiceName,
    top::{Action, Input, Sample, Sampler, Screen, TopArguments, TopError, View, draw},
};
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    time::{Instant, sleep_until},
};

/// When the second reading follows the first, so that rates appear soon.
const FIRST_INTERVAL: Duration = Duration::from_millis(500);
/// The exit code after a signal is this and its number, as shells report it.
const KILLED_BY: u8 = 128;

/// A view, and the Service whose endpoints it shows.
type Question = (View, Option<ServiceName>);
/// A reading, or why there is none.
type Answer = Result<Sample, TopError>;

/// Shows the live table until a key or a signal ends it. The terminal is then as before, also after
/// a panic: ratatui sets a hook.
pub(super) async fn show(arguments: &TopArguments) -> anyhow::Result<ExitCode> {
    let signals = Signals::listen()?;
    let (questions, to_sampler) = mpsc::channel(1);
    let (from_sampler, answers) = mpsc::channel(1);
    tokio::spawn(answer(to_sampler, from_sampler));
    let screen = Screen::new(arguments);
    let live = LiveTable { screen, questions, answers, signals, interval: arguments.interval };
    let mut terminal = ratatui::try_init()?;
    let shown = live.run(&mut terminal, keys()?).await;
    ratatui::restore();
    shown
}

/// Answers questions in turn, so that keys work while the daemon is slow.
async fn answer(mut questions: mpsc::Receiver<Question>, answers: mpsc::Sender<Answer>) {
    let mut sampler = Sampler::default();
    while let Some((view, service)) = questions.recv().await {
        let sample = sampler.sample(view, service.as_ref()).await;
        if answers.send(sample).await.is_err() {
            return;
        }
    }
}

struct LiveTable {
    screen: Screen,
    questions: mpsc::Sender<Question>,
    answers: mpsc::Receiver<Answer>,
    signals: Signals,
    interval: Duration,
}

impl LiveTable {
    async fn run(
        mut self,
        terminal: &mut DefaultTerminal,
        mut keys: mpsc::UnboundedReceiver<OnTerminal>,
    ) -> anyhow::Result<ExitCode> {
        let mut next = Instant::now();
        let mut asked: Option<Question> = None;
        // A key asked for another table, also during a pause.
        let mut must_read = true;
        loop {
            terminal.draw(|frame| draw(frame, &mut self.screen))?;
            let may_ask = asked.is_none() && (must_read || !self.screen.is_paused());
            tokio::select! {
                biased;
                signal = self.signals.next() => return Ok(ExitCode::from(KILLED_BY + signal)),
                event = keys.recv() => {
                    let event = event.context("cannot read keys")?;
                    match event.press(&mut self.screen) {
                        Action::Quit => return Ok(ExitCode::SUCCESS),
                        Action::Read => (must_read, next) = (true, Instant::now()),
                        Action::Draw => {}
                    }
                }
                answer = self.answers.recv() => {
                    let answer = answer.context("the task that asks shunt has ended")?;
                    next = Instant::now() + self.take(answer, asked.take().as_ref());
                }
                () = sleep_until(next), if may_ask => {
                    must_read = false;
                    let question = self.screen.wanted();
                    asked = Some(question.clone());
                    self.questions.send(question).await?;
                }
            }
        }
    }

    /// Shows an answer. Returns when to ask again.
    fn take(&mut self, answer: Answer, asked: Option<&Question>) -> Duration {
        if asked != Some(&self.screen.wanted()) {
            return Duration::ZERO;
        }
        match answer {
            Ok(sample) => {
                let has_rates = sample.has_rates;
                self.screen.show(sample);
                if has_rates { self.interval } else { self.interval.min(FIRST_INTERVAL) }
            }
            Err(error) => {
                self.screen.show_problem(with_causes(&error));
                self.interval
            }
        }
    }
}

/// What happened on the terminal.
enum OnTerminal {
    Key(Input),
    Resized,
}

impl OnTerminal {
    fn of(event: &Event) -> Option<Self> {
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => input(*key).map(Self::Key),
            Event::Resize(..) => Some(Self::Resized),
            _ => None,
        }
    }

    fn press(self, screen: &mut Screen) -> Action {
        match self {
            Self::Key(key) => screen.press(key),
            Self::Resized => Action::Draw,
        }
    }
}

/// Reads keys in a thread of its own.
fn keys() -> anyhow::Result<mpsc::UnboundedReceiver<OnTerminal>> {
    let (keys, received) = mpsc::unbounded_channel();
    let read = move || {
        while let Ok(event) = event::read() {
            if OnTerminal::of(&event).is_some_and(|event| keys.send(event).is_err()) {
                return;
            }
        }
    };
    thread::Builder::new().name("keys".into()).spawn(read)?;
    Ok(received)
}

/// Returns the key, if it may have a meaning.
fn input(KeyEvent { code, modifiers, .. }: KeyEvent) -> Option<Input> {
    if modifiers.contains(KeyModifiers::CONTROL) {
        return (code == KeyCode::Char('c')).then_some(Input::Interrupt);
    }
    let input = match code {
        KeyCode::Char(character) => Input::Character(character),
        KeyCode::Up => Input::Up,
        KeyCode::Down => Input::Down,
        KeyCode::Left => Input::Left,
        KeyCode::Right => Input::Right,
        KeyCode::PageUp => Input::PageUp,
        KeyCode::PageDown => Input::PageDown,
        KeyCode::Home => Input::Home,
        KeyCode::End => Input::End,
        KeyCode::Enter => Input::Enter,
        KeyCode::Esc => Input::Escape,
        KeyCode::Tab => Input::Tab,
        KeyCode::Backspace => Input::Backspace,
        _ => return None,
    };
    Some(input)
}

/// The signals that end the live table.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for one of them. Returns its number.
    async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.terminate.recv() => 15,
            _ = self.interrupt.recv() => 2,
            _ = self.hang_up.recv() => 1,
        }
    }
}
